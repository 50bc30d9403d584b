"""Options that commands share, and the client that the connection options make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.channel import Tls
from paceline.client import Client
from paceline.retry import RetryPolicy

Address = Annotated[str, typer.Option(help="host:port of the gateway, or several with commas between.")]
Token = Annotated[str | None, typer.Option(envvar="PACELINE_TOKEN", help="Bearer token of the gateway.")]
CaFile = Annotated[Path | None, typer.Option(help="Use TLS and trust these authorities (PEM).")]
CertFile = Annotated[Path | None, typer.Option(help="Client certificate (PEM), for mutual TLS.")]
KeyFile = Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Send the token in plain text, on a network that you trust.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def connect(
    address: str,
    token: str | None,
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    insecure: bool = False,
    *,
    leaders_only: bool = False,
) -> Client:
    """Return a client that gives up within seconds, because a person waits at the terminal.

    It asks any gateway, so that the kill switch works while none leads, or `leaders_only`.
    """
    tls = Tls(ca_file, cert_file, key_file) if ca_file or cert_file else None
    retry = RetryPolicy(seconds=1)
    try:
        return Client(
            address,
            token=token,
            tls=tls,
            timeout=5,
            leaders_only=leaders_only,
            retry=retry,
            insecure=insecure,
        )
    except ValueError as error:
        said = str(error).replace("tls=paceline.Tls(...)", "--ca-file").replace("insecure=True", "--insecure")
        raise typer.BadParameter(said, param_hint="--address") from error
