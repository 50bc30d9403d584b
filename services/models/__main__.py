"""Download a model, or wait until another process has.

paceline download --source hf://Qwen/Qwen3-8B --folder /weights/qwen3-8b
python -m services.models --source hf://Qwen/Qwen3-8B --folder /weights/qwen3-8b
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from services.models.download import download, present
from services.models.source import ModelError, Source, as_source

_POLL_SECONDS = 2.0
_LINES_SECONDS = 10.0
_TERMINAL_SECONDS = 1.0

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def download_model(
    source: Annotated[
        str,
        typer.Option(
            help="organization/name on the Hugging Face hub, hf://, s3://, gs://, https://, file://."
        ),
    ],
    folder: Annotated[Path, typer.Option(help="Folder of the model; created if missing.")],
    checksums: Annotated[
        str, typer.Option(help="Address of sha256sum's output. Default: SHA256SUMS of the source, if any.")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Download nothing; wait until another process has.")
    ] = False,
) -> None:
    """Download a model and verify its checksums. An interrupted download is resumed."""
    try:
        address = as_source(source)
        if wait:
            wait_for(address, folder)
        else:
            interval = _TERMINAL_SECONDS if sys.stdout.isatty() else _LINES_SECONDS
            receipt = download(Source(address, checksums), folder, _say, interval=interval)
            _say(f"{receipt.resolved} is complete in {folder}")
    except (ModelError, OSError) as error:
        typer.echo(f"paceline: {error}", err=True)
        raise typer.Exit(1) from error


def wait_for(address: str, folder: Path) -> None:
    """Wait until the model is complete in the folder; ModelError if the folder has another model."""
    reported = False
    while present(address, folder) is None:
        if not reported:
            _say(f"waiting for {address} in {folder}")
            reported = True
        time.sleep(_POLL_SECONDS)


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()


if __name__ == "__main__":
    app()
