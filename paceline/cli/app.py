"""The `paceline` command line."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from paceline.cli import drafter, policy, report, status, token, weights
from paceline.cli.registered import CommandGroup
from paceline.errors import PacelineError

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("status")(status.status)
app.add_typer(policy.app, name="policy", help="Show and change the knobs of speculation; show decisions.")
app.add_typer(drafter.app, name="drafter", help="Show and roll back the drafter that is trained online.")
app.add_typer(weights.app, name="weights", help="Abort a weight update that hangs.")
app.command("report")(report.report)
app.command("token")(token.token)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; an error of a service becomes a message and status 1."""
    try:
        app(list(arguments), prog_name="paceline")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except PacelineError as error:
        typer.echo(f"paceline: {error}", err=True)
        return 1
    return 0
