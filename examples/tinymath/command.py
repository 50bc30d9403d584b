"""`paceline demo`: the demo as a command."""

from __future__ import annotations

import typer

from examples.tinymath.demo_flags import parse
from paceline.errors import CHECKOUT

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Train a tiny model on two instances and write a report. `paceline demo --help` lists the options."""
    given = parse(context.args)
    try:
        from examples.tinymath.demo import main
    except ModuleNotFoundError as error:
        typer.echo(f"paceline: the demo needs `make setup` in {CHECKOUT}: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(main(given))
