"""`paceline token`: a token, and what the gateway keeps of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
import yaml
from pydantic import ValidationError

from services.platform.tokens import Grant, hashed, new_token


def print_token(name: str, scopes: Sequence[str], requests_per_second: float | None, stdin: bool) -> int:
    """Prints the token, once and for all, and its entry; the exit status. 2: an option is wrong."""
    token = sys.stdin.readline().strip() if stdin else new_token()
    if not token:
        typer.echo("paceline: there is no token on standard input", err=True)
        return 2
    entry: dict[str, Any] = {"name": name, "sha256": hashed(token), "scopes": sorted(set(scopes))}
    if requests_per_second is not None:
        entry["requests_per_second"] = requests_per_second
    try:
        Grant.model_validate(entry)
    except ValidationError as error:
        for each in error.errors():
            typer.echo(f"paceline: {'.'.join(map(str, each['loc']))}: {each['msg']}", err=True)
        return 2
    if not stdin:
        typer.echo(f"# For the caller. It cannot be shown again.\n{token}\n")
    typer.echo("# For the gateway's tokens_file.")
    typer.echo(yaml.safe_dump([entry], sort_keys=False, default_flow_style=None), nl=False)
    return 0
