"""`paceline up`: run the local platform in the foreground."""

from __future__ import annotations

import shlex
import signal
import threading
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline import PacelineError, RetryPolicy
from paceline.cli.options import Token, add_columns, plain_console, plain_table
from paceline.cli.report import write_report
from services.local import Platform, PlatformConfig, PlatformError
from services.local.config import LOG_BYTES, DeviceChoice, RestartPolicy
from services.local.doctor import DEVICE_HELP, FindingState, examine, findings_table, refused
from services.models.local_model import hub_name, local_model
from services.models.source import ModelError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_CHECK_SECONDS = 1.0


class DuringUpdate(StrEnum):
    """Use of instances while the trainer updates the policy, as the bubbles coordinator names it."""

    PREGENERATE = "pregenerate"
    HALT = "halt"
    SLEEP = "sleep"


Model = Annotated[
    str,
    typer.Option(
        help="Model folder in Hugging Face layout, organization/name on the hub, an address, or smollm2."
    ),
]
Instances = Annotated[int, typer.Option(min=1, help="Generation instances.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 picks a free one.")]
HttpPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the HTTP facade. Default: there is none.")
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="Names of the model over HTTP, separated by commas; answers have the first. "
        "Default: its name on the hub, or its folder if it is given by that."
    ),
]
RedisUrl = Annotated[str | None, typer.Option(help="Redis to use. Default: start one.")]
Folder = Annotated[Path, typer.Option(help="Folder; logs go to logs/ in it.")]
Device = Annotated[DeviceChoice, typer.Option(help=DEVICE_HELP)]
Pin = Annotated[bool, typer.Option(help="On CPU, pin each instance to its share of the cores.")]
Restart = Annotated[bool, typer.Option(help="Restart instances that died.")]
Learner = Annotated[
    bool, typer.Option("--learner", help="Draft with an EAGLE-3 head that is trained online.")
]
DuringUpdateOption = Annotated[
    DuringUpdate,
    typer.Option(
        help="While the trainer updates: pregenerate the next step, halt, or sleep, which leaves it the GPUs."
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token",
        help="Require no token, for trainers over HTTP that send none: any user of this machine may call.",
    ),
]
LogBytes = Annotated[
    int, typer.Option(min=1 << 16, help="Size at which a log is rotated; three older files are kept.")
]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def up(
    context: typer.Context,
    model: Model,
    instances: Instances = 2,
    port: Port = 7400,
    http_port: HttpPort = None,
    served_model_name: ServedModelName = None,
    redis_url: RedisUrl = None,
    folder: Folder = Path("runs/local"),
    device: Device = DeviceChoice.AUTO,
    pin: Pin = True,
    restart: Restart = True,
    learner: Learner = False,
    during_update: DuringUpdateOption = DuringUpdate.PREGENERATE,
    token: Token = None,
    no_token: NoToken = False,
    log_bytes: LogBytes = LOG_BYTES,
) -> None:
    """Start the whole platform on this machine and run until Ctrl-C.

    Options after `--` go to every instance: paceline up --model DIR -- --max-num-seqs 64
    """
    if served_model_name is not None and http_port is None:
        raise typer.BadParameter("applies to HTTP and needs --http-port", param_hint="--served-model-name")
    config = PlatformConfig(
        model=Path(model),
        instances=instances,
        port=port,
        http_port=http_port,
        served_model_name=served_model_name or hub_name(model),
        redis_url=redis_url,
        folder=folder,
        token=token,
        no_token=no_token,
        log_bytes=log_bytes,
        device=device,
        pin=pin,
        restarts=RestartPolicy() if restart else None,
        instance_options=(*(("--sleep-mode",) if during_update is DuringUpdate.SLEEP else ()), *context.args),
        bubble_options=(f"--during-update={during_update.value}",),
        learner=learner,
    )
    raise typer.Exit(_run_with_model(config, model))


def _run_with_model(config: PlatformConfig, model: str) -> int:
    """Find or download the model, run the platform with it, and return the exit status."""
    if refused(examine(config, None)):  # before a download that may be long
        return 1
    try:
        found = local_model(model, lambda line: typer.echo(f"model: {line}"))
    except (ModelError, OSError) as error:
        typer.echo(f"paceline: {error}", err=True)
        return 1
    return run_until_stopped(replace(config, model=found))


def run_until_stopped(config: PlatformConfig) -> int:
    """Start the platform, show its processes, stop it on SIGINT or SIGTERM; return the exit status."""
    console = plain_console()
    _interrupt_on_sigterm()
    if refused(examine(config, config.model)):
        return 1
    count = f"{config.instances} instance{'s' if config.instances != 1 else ''}"
    console.print(f"Starting {count} of {config.model} ...")
    try:
        with Platform(config, report=console.print) as platform:
            console.print(processes_table(platform))
            logs = platform.processes[0].spec.log.parent
            console.print(f"\nLogs: {logs}", soft_wrap=True)
            stopping = _stop_on_signals()
            for line in how_to_connect(platform):
                console.print(line, soft_wrap=True)
            console.print(f"Gateway: {platform.gateway_address}   (Ctrl-C to stop)")
            while not stopping.wait(_CHECK_SECONDS):
                platform.check()
            console.print("Stopping ...")
            if (report := leave_report(platform)) is not None:
                console.print(f"Report: {report}", soft_wrap=True)
    except PlatformError as error:
        console.print(f"paceline: {error}", soft_wrap=True)
        _explain(console, config)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def how_to_connect(platform: Platform) -> list[str]:
    """Return lines about the token and the HTTP address of a platform."""
    path, url = platform.token_file.absolute(), platform.http_address
    if platform.config.token is None:
        return [*([f"HTTP: {url}"] if url else []), "Token: none; any user of this machine may call"]
    lines = [
        f"Token: {path}, which your clients on this machine find; elsewhere PACELINE_TOKEN_FILE names a copy"
    ]
    if url:
        lines.insert(
            0, f'HTTP: curl {url}/v1/models -H "Authorization: Bearer $(cat {shlex.quote(str(path))})"'
        )
    return lines


def leave_report(platform: Platform) -> Path | None:
    """Write report.html and report.jsonl to the platform's folder, since the decision log ends with the platform.

    Return the page; None if no step of a run has ended, or the gateway no longer answers.
    """
    try:
        with platform.client(retry=RetryPolicy(seconds=0)) as client:
            entries = list(client.watch_decisions(kept=True))
    except PacelineError:
        return None
    if not any(entry.kind == "step" for entry in entries):
        return None
    page = platform.config.folder / "report.html"
    write_report(entries, page, save=page.with_suffix(".jsonl"))
    return page


def _explain(console: Console, config: PlatformConfig) -> None:
    """Show what this machine lacks, if it lacks anything."""
    found = [each for each in examine(config, config.model) if each.state is not FindingState.FINE]
    if found:
        console.print("\nThis machine may be the reason (paceline doctor):")
        console.print(findings_table(found))


def processes_table(platform: Platform) -> Table:
    """Return the processes of a platform and their addresses."""
    table = plain_table()
    add_columns(table, "process")
    add_columns(table, "pid", number=True)
    add_columns(table, "address", "metrics", "runs on")
    for child in platform.processes:
        ready = child.ready
        host = ready.address.rpartition(":")[0] if ready else ""
        table.add_row(
            child.spec.name,
            str(child.pid),
            ready.address if ready else "",
            f"{host}:{ready.metrics_port}" if ready else "",
            _place(child.spec.cores, child.spec.environment.get("CUDA_VISIBLE_DEVICES")),
        )
    if platform.redis is not None:
        table.add_row("redis", str(platform.redis.pid), platform.redis.url, "", "any core")
    return table


def _place(cores: tuple[int, ...], gpu: str | None) -> str:
    if gpu is not None:
        return f"GPU {gpu}"
    return f"core {', '.join(map(str, cores))}" if cores else "any core"


def _interrupt_on_sigterm() -> None:
    """Make SIGTERM end the start and clean up, as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _stop_on_signals() -> threading.Event:
    """Return an event that the first signal sets; a second signal interrupts at once."""
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping
