"""`paceline token`: make a token and the entry that lets a gateway accept it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from paceline.cli.options import Json
from paceline.tokens import TokenEntry, new_token


def token(
    name: Annotated[str, typer.Option(help="Holder of the token, such as trainer.")],
    scope: Annotated[
        list[str], typer.Option(help="rollouts, weights, fleet or metrics; may be given several times.")
    ],
    requests_per_second: Annotated[
        float | None, typer.Option(help="Most RPCs per second in the long run. Default: no limit.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="Runs that it may name, such as 'team-a-*': * is any characters, ? one. May be given several "
            "times. Default: any run."
        ),
    ] = None,
    max_queued_samples: Annotated[
        int | None, typer.Option(help="Most unfinished samples at once. Default: no limit of its own.")
    ] = None,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens that these may come to: prompt and max_tokens. Default: no limit."),
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Hash a token from standard input instead of making one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a token. Prints it, and the entry with its hash for the gateway's tokens_file."""
    secret = sys.stdin.readline().strip() if stdin else new_token()
    if not secret:
        _refuse("there is no token on standard input")
    try:
        entry = TokenEntry.of(
            secret, name, scope, requests_per_second, run or (), max_queued_samples, max_queued_tokens
        )
    except ValueError as error:
        _refuse(str(error))
    if as_json:
        made = {} if stdin else {"token": secret}
        typer.echo(json.dumps({**made, "entry": _fields(entry)}, indent=2))
        return
    if not stdin:
        typer.echo(f"# For the caller. It cannot be shown again.\n{secret}\n")
    typer.echo("# For the gateway's tokens_file.")
    typer.echo(entry_yaml(entry))


def entry_yaml(entry: TokenEntry) -> str:
    """Return an entry as an item of a YAML list."""
    # JSON values are YAML values; quoted, a name or a hash of digits alone stays text.
    return "- " + "\n  ".join(f"{field}: {json.dumps(value)}" for field, value in _fields(entry).items())


def _fields(entry: TokenEntry) -> dict[str, str | float | Sequence[str]]:
    fields: dict[str, str | float | Sequence[str]] = {
        "name": entry.name,
        "sha256": entry.sha256,
        "scopes": entry.scopes,
    }
    if entry.runs:
        fields["runs"] = entry.runs
    for field in ("requests_per_second", "max_queued_samples", "max_queued_tokens"):
        limit = getattr(entry, field)
        if limit is not None:
            fields[field] = limit
    return fields


def _refuse(problem: str) -> None:
    """End the command with status 2: an option is wrong."""
    typer.echo(f"paceline: {problem}", err=True)
    raise typer.Exit(2)
