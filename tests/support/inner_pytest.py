"""Tests that need a process of their own, such as those in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
INNER = "PACELINE_INNER_TESTS"
"""Variable of such processes: logs and figures are those of the run that they belong to."""


def run_tests(paths: Sequence[Path], options: Sequence[str] = (), **environment: str) -> None:
    """Run tests in a process with these variables; they have to pass, and to be there.

    Triton's interpreter is chosen by such a variable before Triton is first imported.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    process = subprocess.run(
        [*command, *options, *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, INNER: "1", **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
    assert " passed" in process.stdout
