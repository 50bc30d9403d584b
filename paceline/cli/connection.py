"""How commands reach a gateway: their options, and the client these make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.channel import Tls
from paceline.client import Client
from paceline.retry import RetryPolicy

Address = Annotated[str, typer.Option(help="host:port of the gateway.")]
Token = Annotated[str | None, typer.Option(envvar="PACELINE_TOKEN", help="Bearer token of the gateway.")]
CaFile = Annotated[Path | None, typer.Option(help="Use TLS and trust these authorities (PEM).")]
CertFile = Annotated[Path | None, typer.Option(help="Certificate to show (PEM), for mutual TLS.")]
KeyFile = Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")]


def connect(
    address: str, token: str | None, ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> Client:
    """A client that gives up after seconds: somebody waits at the terminal."""
    tls = Tls(ca_file, cert_file, key_file) if ca_file or cert_file else None
    return Client(address, token=token, tls=tls, timeout=5, retry=RetryPolicy(attempts=3))
