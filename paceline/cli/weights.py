"""`paceline weights show | abort`: the versions that are served, and an update that does not end."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import GatewayOptions, Json, connected
from paceline.cli.output import print_json
from paceline.cli.status import versions_line

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def weights() -> None:
    """Weight updates."""


@app.command("show")
@connected
def show(gateway: GatewayOptions, as_json: Json = False) -> None:
    """Show the published versions, and the update in progress."""
    with gateway.open() as client:
        versions = client.versions()
    if as_json:
        print_json(versions)
    else:
        typer.echo(versions_line(versions))


@app.command("abort")
@connected
def abort(
    gateway: GatewayOptions,
    update_id: Annotated[
        str, typer.Option("--update", show_default=False, help="Update to abort, if it is still in progress.")
    ] = "",
) -> None:
    """Abort the weight update in progress, whoever waits for it.

    Instances discard what they have of it and go on serving the published version; the trainer's push fails with
    ABORTED. Refused once instances have begun to apply the weights.
    """
    with gateway.open(leaders_only=True) as client:
        found = client.versions()
        wanted = update_id or found.update_id
        if not wanted:
            typer.echo(f"no weight update is in progress; version {found.policy_version} is served")
            return
        served = client.abort_update(wanted)
    typer.echo(f"update {wanted} is aborted; version {served} is served")
