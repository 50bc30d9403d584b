"""Options that commands share, and the client that the connection options make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from paceline.channel import Tls
from paceline.cli.profiles import PROFILE, Profile, ProfileError, read_profile
from paceline.client import Client
from paceline.found_token import TOKEN_FILE, read_token
from paceline.retry import RetryPolicy
from paceline.tls_files import TlsFileError

ADDRESS = "127.0.0.1:7400"
P = ParamSpec("P")
R = TypeVar("R")

Token = Annotated[
    str | None,
    typer.Option(
        help="Bearer token, which others see in the list of processes. Default: PACELINE_TOKEN, the file "
        "PACELINE_TOKEN_FILE, or that of one's own platform on this machine."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_OPTIONS: dict[str, Any] = {
    "address": Annotated[
        str | None,
        typer.Option(
            help="host:port of the gateway, or several with commas between.",
            envvar="PACELINE_ADDRESS",
            show_default=ADDRESS,
        ),
    ],
    "ca_file": Annotated[
        Path | None,
        typer.Option(help="Use TLS and trust these authorities (PEM).", envvar="PACELINE_CA_FILE"),
    ],
    "cert_file": Annotated[
        Path | None,
        typer.Option(help="Client certificate (PEM), for mutual TLS.", envvar="PACELINE_CERT_FILE"),
    ],
    "key_file": Annotated[
        Path | None, typer.Option(help="Private key of the certificate (PEM).", envvar="PACELINE_KEY_FILE")
    ],
    "server_name": Annotated[
        str | None,
        typer.Option(
            help="Name that the gateway's certificate has, if another one is dialled, as localhost of a "
            "forwarded port.",
            envvar="PACELINE_SERVER_NAME",
        ),
    ],
    "token": Token,
    "insecure": Annotated[
        bool | None,
        typer.Option(
            "--insecure",
            help="Send the token in plain text, on a network that you trust.",
            show_default=False,
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option(
            help="Profile of ~/.config/paceline/config.toml with the options that are not given.",
            envvar=PROFILE,
        ),
    ],
}
"""Options of a connection: None where they are not given."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Options of a connection, as a command was given them. The profile has those that are None."""

    address: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    token: str | None = None
    insecure: bool | None = None
    profile: str | None = None

    def open(self, *, leaders_only: bool = False) -> Client:
        """Return a client that gives up within seconds, because a person waits at the terminal.

        It asks any gateway, so that the kill switch works while none leads, or `leaders_only`.

        typer.BadParameter: an option is wrong.
        """
        found = self._profile()
        ca_file, cert_file = self.ca_file or found.ca_file, self.cert_file or found.cert_file
        key_file, name = self.key_file or found.key_file, self.server_name or found.server_name
        tls = Tls(ca_file, cert_file, key_file, name) if ca_file or cert_file or key_file or name else None
        insecure = found.insecure if self.insecure is None else self.insecure
        try:
            return Client(
                (found.address or ADDRESS) if self.address is None else self.address,
                token=self._token(found),
                tls=tls,
                leaders_only=leaders_only,
                insecure=bool(insecure),
                timeout=5,
                retry=RetryPolicy(seconds=1),
            )
        except TlsFileError as error:
            raise typer.BadParameter(str(error), param_hint="--ca-file, --cert-file, --key-file") from error
        except ValueError as error:
            said = (
                str(error)
                .replace("tls=paceline.Tls(...)", "--ca-file")
                .replace("insecure=True", "--insecure")
            )
            hint = TOKEN_FILE if said.startswith(TOKEN_FILE) else "--address"
            raise typer.BadParameter(said, param_hint=hint) from error

    def _profile(self) -> Profile:
        if not self.profile:
            return Profile()
        try:
            return read_profile(self.profile)
        except ProfileError as error:
            raise typer.BadParameter(str(error), param_hint="--profile") from error

    def _token(self, found: Profile) -> str | None:
        if self.token is not None or found.token_file is None:
            return self.token
        try:
            return read_token(found.token_file)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--profile") from error


def connected(command: Callable[Concatenate[GatewayOptions, P], R]) -> Callable[..., R]:
    """Give a command the options of a connection in place of its first parameter."""
    signature = inspect.signature(command, eval_str=True)
    own = [each.replace(kind=each.KEYWORD_ONLY) for each in list(signature.parameters.values())[1:]]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]

    @wraps(command)
    def with_options(**given: Any) -> R:
        gateway = GatewayOptions(**{name: given.pop(name, None) for name in _OPTIONS})
        return command(gateway, **given)  # type: ignore[call-arg]

    described: Any = with_options
    described.__signature__ = signature.replace(parameters=[*own, *added])
    described.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return with_options
