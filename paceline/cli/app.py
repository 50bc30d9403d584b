"""The commands and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)

Token = Annotated[str | None, typer.Option(envvar="PACELINE_TOKEN", help="Bearer token of the gateway.")]


def run(arguments: Sequence[str]) -> int:
    """Parses and runs; errors of the service become one message and status 1."""
    try:
        app(list(arguments), prog_name="paceline")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except PacelineError as error:
        typer.echo(f"paceline: {error}", err=True)
        return 1
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def up(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="Model folder in Hugging Face layout.")],
    instances: Annotated[int, typer.Option(min=1, help="Generation instances.")] = 2,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 picks a free one.")] = 7400,
    redis_url: Annotated[str | None, typer.Option(help="Redis to use; default: one of its own.")] = None,
    folder: Annotated[Path, typer.Option(help="Logs go to logs/ in it.")] = Path("runs/local"),
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is a GPU.")] = "auto",
    pin: Annotated[bool, typer.Option(help="On CPU, share the cores out among the instances.")] = True,
    restart: Annotated[bool, typer.Option(help="Start instances again that died.")] = True,
    token: Token = None,
) -> None:
    """Starts the whole platform on this machine and runs until Ctrl-C.

    Options after `--` go to every instance: paceline up --model DIR -- --max-num-seqs 64
    """
    from paceline.cli.up import run_until_stopped

    options = tuple(context.args)
    raise typer.Exit(
        run_until_stopped(model, instances, port, redis_url, folder, device, pin, restart, token, options)
    )


@app.command()
def status(
    address: Annotated[str, typer.Option(help="host:port of the gateway.")] = "127.0.0.1:7400",
    ca_file: Annotated[Path | None, typer.Option(help="Use TLS and trust these authorities (PEM).")] = None,
    token: Token = None,
) -> None:
    """Shows the instances and the published versions."""
    from paceline.cli.status import show_status

    show_status(address, token, ca_file)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Trains a tiny model on two instances, and writes a report. `paceline demo --help` for options."""
    try:
        from examples.tinymath import demo as example
    except ModuleNotFoundError as error:
        typer.echo(
            f"paceline: the demo needs a checkout of the repository and the demo extra: {error}", err=True
        )
        raise typer.Exit(2) from None
    raise typer.Exit(example.main(context.args))
