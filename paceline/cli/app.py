"""The commands and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import drafter, policy
from paceline.cli.connection import Address, CaFile, CertFile, KeyFile, Token
from paceline.errors import PacelineError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.add_typer(policy.app, name="policy", help="Knobs of speculation, and the platform's decisions.")
app.add_typer(drafter.app, name="drafter", help="The drafter that is trained online.")


def run(arguments: Sequence[str]) -> int:
    """Parses and runs; errors of the service become one message and status 1."""
    try:
        app(list(arguments), prog_name="paceline")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except PacelineError as error:
        typer.echo(f"paceline: {error}", err=True)
        return 1
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def up(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Model folder in Hugging Face layout.")],
    instances: Annotated[int, typer.Option(min=1, help="Generation instances.")] = 2,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 picks a free one.")] = 7400,
    redis_url: Annotated[str | None, typer.Option(help="Redis to use; default: one of its own.")] = None,
    folder: Annotated[Path, typer.Option(help="Logs go to logs/ in it.")] = Path("runs/local"),
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is a GPU.")] = "auto",
    pin: Annotated[bool, typer.Option(help="On CPU, share the cores out among the instances.")] = True,
    restart: Annotated[bool, typer.Option(help="Start instances again that died.")] = True,
    learner: Annotated[
        bool, typer.Option("--learner", help="Draft with an EAGLE-3 head that learns meanwhile.")
    ] = False,
    token: Token = None,
) -> None:
    """Starts the whole platform on this machine and runs until Ctrl-C.

    Options after `--` go to every instance: paceline up --model DIR -- --max-num-seqs 64
    """
    from paceline.cli.up import run_until_stopped

    options = tuple(context.args)
    raise typer.Exit(
        run_until_stopped(
            model, instances, port, redis_url, folder, device, pin, restart, token, options, learner
        )
    )


@app.command()
def status(
    address: Address = "127.0.0.1:7400",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
) -> None:
    """Shows the instances and the published versions."""
    from paceline.cli.status import show_status

    show_status(address, token, ca_file, cert_file, key_file)


@app.command()
def token(
    name: Annotated[str, typer.Option(help="Whose token it is, such as trainer.")],
    scope: Annotated[
        list[str], typer.Option(help="rollouts, weights, fleet or metrics; may be given several times.")
    ],
    requests_per_second: Annotated[
        float | None, typer.Option(help="RPCs that it may begin in a second. Default: any number.")
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Take a token from standard input, and make none.")
    ] = False,
) -> None:
    """Makes a token, and the entry with its hash for the gateway's tokens_file."""
    from paceline.cli.token import print_token

    raise typer.Exit(print_token(name, scope, requests_per_second, stdin))


@app.command()
def calibrate(
    model: Annotated[Path, typer.Option(help="Model folder in Hugging Face layout.")],
    out: Annotated[Path, typer.Option(help="Folder for the fit and its picture.")] = Path("runs/calibration"),
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    seconds: Annotated[float, typer.Option(min=1, help="Time for the sweep, prefill apart.")] = 45,
    max_num_seqs: Annotated[int, typer.Option(min=2, help="Largest batch.")] = 128,
    threads_bind: Annotated[str | None, typer.Option(help="CPU cores of the engine, such as 0-3.")] = None,
    most_median: Annotated[float, typer.Option(help="Largest median error of a fit that is kept.")] = 0.15,
    most_p90: Annotated[float, typer.Option(help="Largest 90th percentile.")] = 0.35,
) -> None:
    """Measures how long steps of a model take on this machine, for the draft planner. About a minute."""
    from paceline.cli.calibrate import run_calibration

    raise typer.Exit(
        run_calibration(model, out, dtype, seconds, max_num_seqs, threads_bind, most_median, most_p90)
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Trains a tiny model on two instances, and writes a report. `paceline demo --help` for options."""
    try:
        from examples.tinymath import demo as example
    except ModuleNotFoundError as error:
        typer.echo(
            f"paceline: the demo needs a checkout of the repository and the demo extra: {error}", err=True
        )
        raise typer.Exit(2) from None
    raise typer.Exit(example.main(context.args))
