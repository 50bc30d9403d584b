"""Options and output that commands share.

`connected` gives a command the options of a connection; their defaults come from a profile in a file of the user.
Output is JSON, or tables that fit into 80 columns unless names are too long.
"""

from __future__ import annotations

import inspect
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, Self, TypeVar, get_args

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

from paceline.calls.caller import RetryPolicy
from paceline.client import Client
from paceline.transport.channel import DEFAULT_PORT, Tls, TlsFileError
from paceline.transport.options import TOKEN_FILE, read_token

CONFIG, PROFILE = "PACELINE_CONFIG", "PACELINE_PROFILE"
ADDRESS = "127.0.0.1:7400"
_MOST_NAMED = 20
_PADDING = 2
_FOLDED_WIDTH = 10
"""Least width of a column with folded cells."""


class ProfileError(ValueError):
    """Raised for an unusable profile; the message names the file."""


def config_file() -> Path:
    """Return the path of the file with profiles. RuntimeError: the user has no home folder."""
    if named := os.environ.get(CONFIG):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "paceline/config.toml"


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Token = Annotated[
    str | None,
    typer.Option(
        help="Bearer token, which others see in the list of processes. Default: PACELINE_TOKEN, the file "
        "PACELINE_TOKEN_FILE, or the token of your own platform on this machine."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_OPTIONS: dict[str, Any] = {
    "address": Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Gateway, or several with commas between; the port is {DEFAULT_PORT} unless given. "
            f"Default: {ADDRESS}.",
            envvar="PACELINE_ADDRESS",
        ),
    ],
    "ca_file": Annotated[
        Path | None,
        typer.Option(
            help="Use TLS and trust these authorities (PEM). Default: plain text.", envvar="PACELINE_CA_FILE"
        ),
    ],
    "cert_file": Annotated[
        Path | None,
        typer.Option(
            help="Client certificate (PEM), for mutual TLS. Default: none.", envvar="PACELINE_CERT_FILE"
        ),
    ],
    "key_file": Annotated[
        Path | None,
        typer.Option(help="Private key of the certificate (PEM). Default: none.", envvar="PACELINE_KEY_FILE"),
    ],
    "server_name": Annotated[
        str | None,
        typer.Option(
            help="Name in the gateway's certificate, such as paceline-gateway for a forwarded port. Default: "
            "the name in the address.",
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
            help="Profile of ~/.config/paceline/config.toml, for options that are not given. Default: none.",
            envvar=PROFILE,
        ),
    ],
}
"""Options of a connection, by name."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Options of a connection; None for each that is not given. The command line has them, and so has a profile."""

    address: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    insecure: bool | None = None
    token: str | None = None
    """Only of the command line, whose user may choose to show it; a profile names a file."""
    token_file: Path | None = None
    """Only of a profile."""
    profile: str | None = None
    """Only of the command line."""

    @classmethod
    def of_profile(cls, values: dict[str, Any], folder: Path) -> Self:
        """Return the options in a table of a file in `folder`. ProfileError: a wrong name or type."""
        names = [field.name for field in fields(cls) if field.name not in ("token", "profile")]
        if unknown := sorted(values.keys() - set(names)):
            raise ProfileError(f"{unknown[0]!r} is not an option; options are {', '.join(names)}")
        for name, value in values.items():
            wanted, allowed = (bool, "true or false") if name == "insecure" else (str, "text")
            if type(value) is not wanted:
                raise ProfileError(f"{name} is {value!r}; must be {allowed}")
        files = [name for name in values if name.endswith("_file")]
        return cls(**{**values, **{name: folder / Path(values[name]).expanduser() for name in files}})

    def open(self, *, leaders_only: bool = False) -> Client:
        """Return a client that gives up within seconds, because a person waits at the terminal.

        It calls any gateway, so that the kill switch works without a leader; with `leaders_only` it calls leaders.

        Raises:
            typer.BadParameter: an option is wrong.
        """
        try:
            found = self.with_profile()
        except ProfileError as error:
            raise typer.BadParameter(str(error), param_hint="--profile") from error
        files = (found.ca_file, found.cert_file, found.key_file)
        tls = Tls(*files, found.server_name) if any((*files, found.server_name)) else None
        try:
            return Client(
                ADDRESS if found.address is None else found.address,
                token=found.token,
                tls=tls,
                leaders_only=leaders_only,
                insecure=bool(found.insecure),
                timeout=5,
                retry=RetryPolicy(seconds=1),
            )
        except TlsFileError as error:
            raise typer.BadParameter(str(error), param_hint="--ca-file, --cert-file, --key-file") from error
        except ValueError as error:
            message = (
                str(error)
                .replace("tls=paceline.Tls(...)", "--ca-file")
                .replace("insecure=True", "--insecure")
            )
            hint = TOKEN_FILE if message.startswith(TOKEN_FILE) else "--address"
            raise typer.BadParameter(message, param_hint=hint) from error

    def with_profile(self) -> GatewayOptions:
        """Return these options, with the profile's value for each that is None. ProfileError: it cannot be used."""
        if not self.profile:
            return self
        other = read_profile(self.profile)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        found = replace(other, **{name: value for name, value in given.items() if value is not None})
        if found.token is not None or found.token_file is None:
            return found
        try:
            return replace(found, token=read_token(found.token_file))
        except ValueError as error:
            raise ProfileError(str(error)) from error


def read_profile(name: str) -> GatewayOptions:
    """Return the options of a profile. ProfileError: there is none of this name, or it cannot be read."""
    try:
        path = config_file()
        profiles = tomllib.loads(path.read_text()).get("profiles", {})
    except (OSError, RuntimeError, ValueError) as error:
        raise ProfileError(f"profiles cannot be read: {error}") from error
    found = profiles.get(name) if isinstance(profiles, dict) else None
    if not isinstance(found, dict):
        names = ", ".join(map(repr, list(profiles)[:_MOST_NAMED])) or "none"
        raise ProfileError(f"{path} has no profile {name!r}; profiles are {names}")
    try:
        return GatewayOptions.of_profile(found, path.parent)
    except ProfileError as error:
        raise ProfileError(f"{path}: profile {name!r}: {error}") from error


def connected(command: Callable[Concatenate[GatewayOptions, P], R]) -> Callable[..., R]:
    """Replace the first parameter of a command by the options of a connection."""
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


def with_value_names(command: Callable[..., Any]) -> None:
    """Name the values of a command's options in its help, where the options do not.

    Typer would name their type, such as <str>. The name is the last word of the option, or PATH, N or X.
    """
    signature = inspect.signature(command, eval_str=True)
    for parameter in signature.parameters.values():
        kind, *described = get_args(parameter.annotation) or (parameter.annotation,)
        for each in described:
            if isinstance(each, typer.models.ParameterInfo) and each.metavar is None:
                each.metavar = _value_name(parameter.name, kind)
    # Typer reads these, and would evaluate annotations that are texts again.
    described_command: Any = command
    described_command.__signature__ = signature
    described_command.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }


def _value_name(option: str, kind: Any) -> str | None:
    """Return the name of an option's values. None: Typer knows better, since it is a flag or has few values."""
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    if any(each is bool or (isinstance(each, type) and issubclass(each, Enum)) for each in kinds):
        return None
    word = option.rpartition("_")[2].upper()
    if word in ("SECONDS", "PORT", "BYTES", "FOLDER", "FILE"):
        return word
    return {Path: "PATH", int: "N", float: "X"}.get(kinds[0], word)


def plain_console() -> Console:
    """Return a console that prints texts as they are: brackets are not markup, and names between colons no emoji.

    Texts such as addresses and paths have both. Give a `rich.text.Text` to print in colour.
    """
    return Console(markup=False, emoji=False, highlight=False)


def plain_table() -> Table:
    """Return a table without lines. Long cells fold into several lines and are not cut."""
    return Table(box=None, padding=(0, _PADDING, 0, 0), header_style="bold")


def add_columns(table: Table, *names: str, number: bool = False, whole: bool = False) -> None:
    """Add columns. `number` columns are right-aligned; `number` and `whole` columns are never folded."""
    for name in names:
        if number or whole:
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")


def least_width(console: Console, table: Table) -> int:
    """Return the least width of a table of `plain_table` that shows columns without folding in full."""
    options = console.options.update(width=10_000)

    def width(column: Column) -> int:
        cells = (column.header, *column.cells)
        widest = max(Measurement.get(console, options, cell).maximum for cell in cells)
        return (widest if column.no_wrap else min(widest, _FOLDED_WIDTH)) + _PADDING

    return sum(map(width, table.columns))


def print_whole(console: Console, table: Table) -> None:
    """Print a table in full, on lines longer than the terminal's if necessary."""
    console.width = max(console.width, least_width(console, table))
    console.print(table)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print dataclasses, and containers of them, as JSON; with `indent` None on one line."""
    typer.echo(json.dumps(value, indent=indent, default=_plain))


def show(record: T, as_json: bool, lines: Callable[[T], str]) -> None:
    """Print a record: as JSON, or as the text that `lines` makes of it."""
    if as_json:
        print_json(record)
    else:
        typer.echo(lines(record))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
