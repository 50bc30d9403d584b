"""The `paceline` command line: its own commands, and the ones that other packages register."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from paceline.cli import operations, policy, report
from paceline.cli.options import with_value_names
from paceline.errors import CHECKOUT, PacelineError, how_to_install

GROUP = "paceline.commands"
"""Entry points of commands that other packages register."""
SECTIONS = {
    "Steps and runs": ("status", "batches", "cancel", "end-run", "report"),
    "Fleet": ("pause", "resume", "drain", "policy", "drafter", "weights"),
    "Server": ("up", "doctor", "demo", "download", "calibrate", "simulate", "token"),
}
"""Commands in the order of `--help`; any others come last."""


DEBUG = "PACELINE_DEBUG"
"""Environment variable that makes errors show their traceback."""
_INTERRUPTED = 130
_OTHER_VERSION = f"is of another version than the rest: install again, by `make setup` or {how_to_install()}"
_EXAMPLES = """\b
Examples:
  paceline doctor                          what this machine lacks
  paceline up --model smollm2              a platform on this machine
  paceline status --watch                  its instances, at each change
  paceline report --run my-run             a page on how a run went
  paceline status --address gateway:7400   a platform elsewhere
"""


class CommandGroup(TyperGroup):
    """Group of the SDK's own commands and of registered ones."""

    # Contexts and commands are Any: some versions of Typer take their classes from click, others have their own.

    _lists = False
    """True while names of commands are completed, which needs no command."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, the SDK's own first."""
        own = super().list_commands(ctx)
        return [*own, *sorted(entry_points(group=GROUP).names - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of that name."""
        own = super().get_command(ctx, cmd_name)
        found = tuple(entry_points(group=GROUP, name=cmd_name))
        if own is None and found:
            return self._listed(found[0]) if self._lists else _load(found[0])
        if own is None and any(cmd_name in section for section in SECTIONS.values()):
            return _refusing(cmd_name, _OTHER_VERSION)
        return own

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return what may complete a word; for names of commands none of their modules is imported."""
        self._lists = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._lists = False

    @staticmethod
    def _listed(entry: EntryPoint) -> Any:
        return TyperCommand(entry.name, help=brief(entry))

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
    """Return the summary of a registered command; if its source is there, without importing its module."""
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
    """Return the first sentence of the docstring of the function that is decorated as a command, or ""."""
    for each in module.body:
        if isinstance(each, ast.FunctionDef) and any(
            "app.command" in ast.unparse(by) for by in each.decorator_list
        ):
            return (ast.get_docstring(each) or "").partition("\n\n")[0].partition(". ")[0].rstrip(".") + "."
    return ""


def _find_server() -> None:
    # In a checkout the folders of the server are on the path already.
    with suppress(ModuleNotFoundError):
        import_module("paceline_server")


def _load(entry: EntryPoint) -> Any:
    _find_server()
    try:
        return get_command(named_values(entry.load()))
    except ModuleNotFoundError as error:
        top = entry.module.partition(".")[0]
        if top == "examples":
            # No installation has the examples, except an editable one, which is in a checkout.
            needed = f"`make setup` in {CHECKOUT}; then run `make demo` there"
        elif (error.name or "").startswith(f"{top}.") and find_spec(top) is not None:
            return _refusing(entry.name, _OTHER_VERSION, error)
        else:
            needed = f"the server: {how_to_install('cpu', server=True)} (or cuda instead of cpu)"
        return _refusing(entry.name, f"needs {needed}", error)
    except (AttributeError, ImportError) as error:
        return _refusing(entry.name, _OTHER_VERSION, error)


def _refusing(name: str, reason: str, error: Exception | None = None) -> Any:
    """Return a command that says why it cannot run, and ends with status 2."""
    message = f"paceline: {name} {reason}" + (f": {error}" if error else "")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(
        name,
        help=f"Not available: {reason}.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def refuse(_: typer.Context) -> None:
        typer.echo(message, err=True)
        raise typer.Exit(2)

    return get_command(app)


def named_values(app: typer.Typer) -> typer.Typer:
    """Name the values of all options of an application in its help, and return it."""
    for each in app.registered_commands:
        if each.callback is not None:
            with_value_names(each.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            named_values(group.typer_instance)
    return app


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXAMPLES,
)
app.command("status")(operations.status)
app.command("batches")(operations.batches)
app.command("cancel")(operations.cancel)
app.command("end-run")(operations.end_run)
app.command("pause")(operations.pause)
app.command("resume")(operations.resume)
app.command("drain")(operations.drain)
app.add_typer(
    policy.policy_app, name="policy", help="Show and change the knobs of speculation; show decisions."
)
app.add_typer(
    policy.drafter_app, name="drafter", help="Show and roll back the drafter that is trained online."
)
app.add_typer(
    operations.weights_app, name="weights", help="Show the published versions; abort an update that hangs."
)
app.command("report")(report.report)
app.command("token")(operations.token)
named_values(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"paceline {version('paceline')}")
        except PackageNotFoundError:
            typer.echo(f"paceline: it is not installed: `make setup`, or {how_to_install('cli')}", err=True)
            raise typer.Exit(1) from None
        raise typer.Exit


@app.callback()
def paceline(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version, and exit."
        ),
    ] = False,
) -> None:
    """Generate the samples of RL post-training, and run the platform that does."""


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status.

    An error of a service, of a file or of a value becomes a message and status 1; Ctrl-C gives status 130. If
    PACELINE_DEBUG is set in the environment, the error is raised.
    """
    try:
        app(list(arguments), prog_name="paceline")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (PacelineError, OSError, ValueError) as error:
        if os.environ.get(DEBUG):
            raise
        print(f"paceline: {_message(error)}", file=sys.stderr)
        return 1
    return 0


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
