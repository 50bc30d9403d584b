"""Commands that other packages add to the command line.

An entry point of the group `paceline.commands` names a Typer app with one command:

    [project.entry-points."paceline.commands"]
    up = "services.local.up:app"

Its module is imported only when the command is run, or listed by `--help`. The server's are found where it is
installed, and in a checkout.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from paceline.installation import CHECKOUT, how_to_install

GROUP = "paceline.commands"


class CommandGroup(TyperGroup):
    """The SDK's own commands and the registered ones."""

    # Contexts and commands are Any: their classes are click's in some versions of Typer, and its own in others.

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, the SDK's own first."""
        own = super().list_commands(ctx)
        return [*own, *sorted(entry_points(group=GROUP).names - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None when there is none of that name."""
        own = super().get_command(ctx, cmd_name)
        found = tuple(entry_points(group=GROUP, name=cmd_name))
        return _load(found[0]) if own is None and found else own


def _load(entry: EntryPoint) -> Any:
    # Not needed in a checkout, where the folders of the server are on the path already.
    with suppress(ModuleNotFoundError):
        import_module("paceline_server")
    try:
        return get_command(entry.load())
    except ModuleNotFoundError as error:
        return _unavailable(entry, error)


def _unavailable(entry: EntryPoint, error: ModuleNotFoundError) -> Any:
    """Return a command that says which installation it needs, and ends with status 2."""
    if entry.module.partition(".")[0] == "examples":
        needed = f"{CHECKOUT}: `make setup` and `make demo` there"
    else:
        needed = f"the server: {how_to_install('cpu', server=True)} (or cuda instead of cpu)"
    message = f"paceline: {entry.name} needs {needed}: {error}"
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(
        entry.name,
        help=f"Not available: needs {needed}.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def refuse(_: typer.Context) -> None:
        typer.echo(message, err=True)
        raise typer.Exit(2)

    return get_command(app)
