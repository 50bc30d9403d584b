"""`paceline pause | resume | drain`: instances of the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from paceline.cli.options import GatewayOptions, connected

Instances = Annotated[
    list[str] | None, typer.Argument(help="Instances, as `paceline status` names them. Default: all.")
]


@connected
def pause(gateway: GatewayOptions, instances: Instances = None) -> None:
    """Pause the steps of instances. No sample is lost: they go on with `paceline resume`."""
    with gateway.open(leaders_only=True) as client:
        _tell("paused", client.pause(instances or ()))


@connected
def resume(gateway: GatewayOptions, instances: Instances = None) -> None:
    """Let paused instances go on."""
    with gateway.open(leaders_only=True) as client:
        _tell("resumed", client.resume(instances or ()))


@connected
def drain(
    gateway: GatewayOptions,
    instance: Annotated[str, typer.Argument(help="Instance, as `paceline status` names it.")],
) -> None:
    """Drain an instance for good: its samples go on elsewhere.

    It gets no others, and can be stopped then. It takes as long as its samples take to move.
    """
    with gateway.open(leaders_only=True) as client:
        moved = client.drain(instance)
    typer.echo(f"{instance} is drained; {moved} samples go on elsewhere")


def _tell(done: str, instances: Sequence[str]) -> None:
    typer.echo(f"{done}: {', '.join(instances)}" if instances else f"no instance is {done}")
