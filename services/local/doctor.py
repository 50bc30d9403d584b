"""`paceline doctor`: what this machine lacks for a platform, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.options import Json
from paceline.cli.output import add_columns, plain_table, print_json
from services.local.config import PlatformConfig
from services.local.findings import PACKAGES, Finding, FindingState, Needs, findings
from services.local.machine import chooses_cuda, read_machine
from services.local.model_outlook import model_findings

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def doctor(
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder: whether there is room for it, and what vLLM makes of it."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the model: float32, bfloat16, float16, or auto: its own.")
    ] = "auto",
    instances: Annotated[int, typer.Option(min=1, help="Generation instances.")] = 2,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway.")] = 7400,
    http_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the HTTP facade.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the platform.")] = Path("runs/local"),
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: CUDA with a GPU and a vLLM for it.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Say what this machine lacks for a platform.

    Takes the options of `paceline up`; status 1 if that cannot start.
    """
    config = PlatformConfig(
        model=model or Path(),
        instances=instances,
        port=port,
        http_port=http_port,
        folder=folder,
        device=device,  # type: ignore[arg-type]
    )
    found = examine(config)
    if model is not None and not any(
        each.about == "packages" and each.state is not FindingState.FINE for each in found
    ):
        found += model_findings(model, dtype)
    if as_json:
        print_json([{"about": each.about, "state": each.state.value, "text": each.text} for each in found])
    else:
        Console().print(findings_table(found))
    raise typer.Exit(any(each.state is FindingState.MISSING for each in found))


def examine(config: PlatformConfig) -> list[Finding]:
    """Return what is found about this machine for a platform."""
    ports = tuple(port for port in (config.port, config.http_port) if port)
    machine = read_machine(config.folder, ports, PACKAGES)
    needs = Needs(
        instances=config.instances,
        cuda=chooses_cuda(config.device, machine.gpus),
        ports=ports,
        model_bytes=_weights_bytes(config.model),
    )
    return findings(machine, needs)


def findings_table(found: Sequence[Finding]) -> Table:
    """Return findings as a table, one a line."""
    table = plain_table()
    add_columns(table, "", "this machine", "")
    for each in found:
        table.add_row(each.about, each.state.value, each.text)
    return table


def _weights_bytes(model: Path) -> int:
    if not (model / "config.json").is_file():
        return 0
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
