"""The command line: `paceline status | policy | drafter | report | token`, and commands of other packages.

Unlike the SDK it needs the extra `cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.errors import how_to_install

_MISSING = f"""paceline: the command line needs more than the SDK ({{name}} is not installed):

    {how_to_install("cli")}: status, policy, drafter, report and token
    {how_to_install("cpu", server=True)}: also up, doctor, calibrate and others, on CPU"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    try:
        from paceline.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "rich", "typer"):
            raise
        print(_MISSING.format(name=error.name), file=sys.stderr)
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)
