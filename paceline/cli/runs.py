"""`paceline batches | cancel | end-run`: what runs have asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.options import GatewayOptions, Json, connected
from paceline.cli.output import add_columns, plain_table, print_json, print_whole
from paceline.types import BatchStatus

RunId = Annotated[str, typer.Argument(metavar="RUN", help="Run, as its trainer names it.")]


@connected
def batches(
    gateway: GatewayOptions,
    run: Annotated[str, typer.Option(help="Batches of this run. Default: of all.")] = "",
    as_json: Json = False,
) -> None:
    """Show the batches in work, and the last ones that have finished."""
    with gateway.open(leaders_only=True) as client:
        found = list(client.batches(run))
    if as_json:
        print_json(found)
    elif found:
        print_whole(Console(), batches_table(found, time.time()))
    else:
        typer.echo("there are no batches" + (f" of {run}" if run else ""))


@connected
def cancel(
    gateway: GatewayOptions,
    run: RunId,
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Batch, as `paceline batches` names it.")],
) -> None:
    """Cancel the unfinished samples of a batch. Its trainer reads them as cancelled."""
    with gateway.open(leaders_only=True) as client:
        cancelled = client.cancel(run, batch)
    typer.echo(f"{cancelled} samples of batch {batch} were unfinished and are cancelled")


@connected
def end_run(gateway: GatewayOptions, run: RunId) -> None:
    """End a run, and let go of all that is kept for it.

    Its unfinished samples are cancelled. Samples that its trainer has not read are lost. The run may begin again.
    """
    with gateway.open(leaders_only=True) as client:
        ended = client.end_run(run)
    typer.echo(
        f"{run} has ended: {ended.batches} batches, of which {ended.cancelled} samples were unfinished"
    )


def batches_table(found: Sequence[BatchStatus], now: float) -> Table:
    """Return a table of batches; `now` is in unix seconds."""
    table = plain_table()
    add_columns(table, "run", "batch", whole=True)
    add_columns(table, "step", "version", "finished", "read", "age", number=True)
    add_columns(table, "state")
    for each in found:
        state = "open" if each.open else "done" if each.finished == each.total else "in work"
        table.add_row(
            each.run_id,
            each.batch_id,
            str(each.step),
            str(each.policy_version),
            f"{each.finished}/{each.total}",
            str(each.acknowledged),
            f"{max(0.0, now - each.accepted_at):.0f} s",
            state,
        )
    return table
