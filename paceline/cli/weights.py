"""`paceline weights abort`: a weight update that does not end."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import Address, CaFile, CertFile, Insecure, KeyFile, Token, connect

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def weights() -> None:
    """Weight updates."""


@app.command("abort")
def abort(
    address: Address = "127.0.0.1:7400",
    update_id: Annotated[
        str, typer.Option("--update", show_default=False, help="Update to abort, if it is still in progress.")
    ] = "",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
    insecure: Insecure = False,
) -> None:
    """Abort the weight update in progress, whoever waits for it.

    Instances discard what they have of it and go on serving the published version; the trainer's push fails with
    ABORTED. Refused once instances have begun to apply the weights.
    """
    with connect(address, token, ca_file, cert_file, key_file, insecure, leaders_only=True) as client:
        found = client.versions()
        wanted = update_id or found.update_id
        if not wanted:
            typer.echo(f"no weight update is in progress; version {found.policy_version} is served")
            return
        served = client.abort_update(wanted)
    typer.echo(f"update {wanted} is aborted; version {served} is served")
