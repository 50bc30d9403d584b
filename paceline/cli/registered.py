"""Commands that other packages add to the command line.

An entry point of the group `paceline.commands` names a Typer app with one command:

    [project.entry-points."paceline.commands"]
    up = "services.local.up:app"

Its module is imported only when the command is run: `paceline --help` reads the line that it lists from the source
of the command, since the modules of all commands together take seconds to import. The server's are found where it
is installed, and in a checkout.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from paceline.installation import CHECKOUT, how_to_install

GROUP = "paceline.commands"
SECTIONS = {
    "Steps and runs": ("status", "batches", "cancel", "end-run", "report"),
    "Fleet": ("pause", "resume", "drain", "policy", "drafter", "weights"),
    "Server": ("up", "doctor", "demo", "download", "calibrate", "simulate", "token"),
}
"""Commands as `--help` lists them; those of other packages come last."""


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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their sections, each with one line."""
        registered = {entry.name: entry for entry in entry_points(group=GROUP)}
        names = self.list_commands(ctx)
        known = {name for section in SECTIONS.values() for name in section}
        others = tuple(name for name in names if name not in known)
        width = max(map(len, names))
        for title, section in {**SECTIONS, "Others": others}.items():
            lines = []
            for name in section:
                own = super().get_command(ctx, name)
                if own is not None:
                    lines.append((name.ljust(width), own.get_short_help_str(formatter.width)))
                elif name in registered:
                    lines.append((name.ljust(width), brief(registered[name])))
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


def brief(entry: EntryPoint) -> str:
    """Return the first sentence about a registered command, without importing its module if its source is there."""
    _find_server()
    top, *path = entry.module.split(".")
    spec = find_spec(top)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for place in places:
        source = Path(place, *path).with_suffix(".py")
        if source.is_file() and (found := _documented(ast.parse(source.read_text("utf-8")))):
            return found
    return str(_load(entry).get_short_help_str(1000))


def _documented(module: ast.Module) -> str:
    """Return the first sentence of the docstring of the one function that is decorated as a command."""
    for each in module.body:
        if isinstance(each, ast.FunctionDef) and any(
            "app.command" in ast.unparse(by) for by in each.decorator_list
        ):
            return (ast.get_docstring(each) or "").partition("\n\n")[0].partition(". ")[0].rstrip(".") + "."
    return ""


def _find_server() -> None:
    # Not needed in a checkout, where the folders of the server are on the path already.
    with suppress(ModuleNotFoundError):
        import_module("paceline_server")


def _load(entry: EntryPoint) -> Any:
    _find_server()
    try:
        return get_command(entry.load())
    except ModuleNotFoundError as error:
        return _unavailable(entry, error)


def _unavailable(entry: EntryPoint, error: ModuleNotFoundError) -> Any:
    """Return a command that says which installation it needs, and ends with status 2."""
    if entry.module.partition(".")[0] == "examples":
        # No installation has the examples, except an editable one, which is in a checkout.
        needed = f"`make setup` in {CHECKOUT}; then run `make demo` there"
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
