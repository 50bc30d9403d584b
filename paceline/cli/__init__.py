"""The command line: `paceline up | status | policy | token | demo`. Needs the `services` extra, unlike the SDK."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_MISSING = """paceline: the command line needs more than the SDK ({name} is not installed). On CPU:

    pip install 'paceline[cpu,demo]'

`status` alone needs only 'paceline[services]'."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    try:
        from paceline.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(_MISSING.format(name=error.name), file=sys.stderr)
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)
