"""`paceline up`: the local platform in the foreground."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from services.local import Platform, PlatformConfig, PlatformError
from services.local.restarts import RestartPolicy

_CHECK_SECONDS = 1.0


def run_until_stopped(
    model: Path,
    instances: int,
    port: int,
    redis_url: str | None,
    folder: Path,
    device: str,
    pin: bool,
    restart: bool,
    token: str | None,
    instance_options: tuple[str, ...],
    learner: bool = False,
) -> int:
    """Starts the platform, shows what runs where, and stops it on SIGINT or SIGTERM."""
    config = PlatformConfig(
        model=model.absolute(),
        instances=instances,
        port=port,
        redis_url=redis_url,
        folder=folder,
        token=token,
        device=cast(Any, device),
        pin=pin,
        restarts=RestartPolicy() if restart else None,
        instance_options=instance_options,
        learner=learner,
    )
    console = Console()
    _interrupt_on_sigterm()
    console.print(f"Starting {instances} instances of {model} ...", markup=False)
    try:
        with Platform(config) as platform:
            console.print(processes_table(platform))
            stopping = _stop_on_signals()
            console.print(f"\nGateway: {platform.gateway_address}   (Ctrl-C to stop)", highlight=False)
            while not stopping.wait(_CHECK_SECONDS):
                platform.check()
            console.print("Stopping ...")
    except PlatformError as error:
        console.print(f"paceline: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def processes_table(platform: Platform) -> Table:
    """What runs where."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("process", "pid", "address", "metrics", "runs on", "log"):
        table.add_column(name, overflow="fold")
    for child in platform.processes:
        ready = child.ready
        host = ready.address.rpartition(":")[0] if ready else ""
        table.add_row(
            child.spec.name,
            str(child.pid),
            ready.address if ready else "",
            f"http://{host}:{ready.metrics_port}/metrics" if ready else "",
            _place(child.spec.cores, child.spec.environment.get("CUDA_VISIBLE_DEVICES")),
            str(child.spec.log),
        )
    if platform.redis is not None:
        table.add_row("redis", str(platform.redis.pid), platform.redis.url, "", "any core", "")
    return table


def _place(cores: tuple[int, ...], gpu: str | None) -> str:
    if gpu is not None:
        return f"GPU {gpu}"
    return f"core {', '.join(map(str, cores))}" if cores else "any core"


def _interrupt_on_sigterm() -> None:
    """While starting, SIGTERM does what Ctrl-C does: the start is broken off and cleaned up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _stop_on_signals() -> threading.Event:
    """Set by the first signal; a second one breaks off."""
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping
