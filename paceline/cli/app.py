"""The `paceline` command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from paceline.cli import drafter, fleet, policy, report, runs, status, token, weights
from paceline.cli.registered import CommandGroup
from paceline.errors import PacelineError

DEBUG = "PACELINE_DEBUG"
"""Variable with which errors come with their traceback."""
_INTERRUPTED = 130
_EXAMPLES = """\b
Examples:
  paceline doctor                          what this machine lacks
  paceline up --instances 2                a platform on this machine
  paceline status --watch                  its instances, again and again
  paceline report --run my-run             a page on how a run went
  paceline status --address gateway:7400   a platform elsewhere
"""

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXAMPLES,
)
app.command("status")(status.status)
app.command("batches")(runs.batches)
app.command("cancel")(runs.cancel)
app.command("end-run")(runs.end_run)
app.command("pause")(fleet.pause)
app.command("resume")(fleet.resume)
app.command("drain")(fleet.drain)
app.add_typer(policy.app, name="policy", help="Show and change the knobs of speculation; show decisions.")
app.add_typer(drafter.app, name="drafter", help="Show and roll back the drafter that is trained online.")
app.add_typer(weights.app, name="weights", help="Show the published versions; abort an update that hangs.")
app.command("report")(report.report)
app.command("token")(token.token)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {version('paceline')}")
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

    An error of a service, of a file or of a value becomes a message and status 1, and Ctrl-C status 130. With
    PACELINE_DEBUG in the environment the error is raised.
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
        print(f"paceline: {_said(error)}", file=sys.stderr)
        return 1
    return 0


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
