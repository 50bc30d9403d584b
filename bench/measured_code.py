"""Compare the code that a figure measures with the code that it was measured on.

A result keeps a sample of the lines of that code. Lines are compared without indentation, wherever they stand.
Blank lines, comments, docstrings and imports do not count, and a repeated line counts once. A line that is split,
or has a name replaced, has changed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_SAMPLE = 400
"""Lines of a sample: their share has a standard error of 2.5 % at most."""
_DIGITS = 8
_MARKED = (0.5, 0.75)
"""Shares that a mark distinguishes in addition to a benchmark's own. Few, so that few changes move a mark."""


@dataclass(frozen=True, slots=True)
class MeasuredCode:
    """Files and folders that a benchmark's figures measure, and the share of their lines that may change.

    The figures are stale beyond `share`.
    """

    paths: tuple[str, ...]
    share: float = 0.2


_WHOLE = MeasuredCode(
    (
        "services/generation",
        "services/gateway",
        "services/bubbles",
        "services/drafts",
        "services/reallocator",
    ),
    0.3,
)
_DRAFTING = ("services/generation/drafters", "services/generation/speculation", "services/step_time")
_MOVES = ("services/generation/migration", "services/generation/kv_transfer")
_DEVICES = "services/simulator/device_tables.py"
MEASURED: Mapping[str, MeasuredCode] = {
    "rollout": _WHOLE,
    "leave_one_out": _WHOLE,
    "gateway": MeasuredCode(
        ("services/gateway", "services/generation/loop", "services/generation/server"), 0.3
    ),
    "facade": MeasuredCode(("services/facade",), 0.3),
    "fleet": MeasuredCode(("services/gateway", "services/platform/redis"), 0.3),
    "weights": MeasuredCode(("services/generation/weights", "paceline/weights")),
    "coupled": MeasuredCode((*_DRAFTING, "services/generation/engine"), 0.3),
    "precision": MeasuredCode(("kernels/coupled_sampler", "services/generation/engine"), 0.3),
    "policy": MeasuredCode(_DRAFTING),
    "policy.simulated": MeasuredCode((*_DRAFTING, _DEVICES)),
    "axes": MeasuredCode((*_DRAFTING, _DEVICES)),
    "device_clock": MeasuredCode((*_DRAFTING, _DEVICES, "services/bubbles", "services/drafts")),
    "host_step": MeasuredCode(
        (*_DRAFTING, "services/generation/loop", "services/generation/engine/core_steps.py"), 0.3
    ),
    "migration": MeasuredCode((*_MOVES, "services/reallocator")),
    "gpu": MeasuredCode((*_DRAFTING, "services/generation/engine", "kernels"), 0.3),
    "learner": MeasuredCode(
        ("services/drafter/learning", "services/drafter/training", *_DRAFTING, "services/simulator")
    ),
    "simulate.replays": MeasuredCode(("services/simulator", "services/bubbles", "services/reallocator")),
    "simulate": MeasuredCode(
        (
            *_DRAFTING,
            "services/simulator",
            "services/bubbles",
            "services/reallocator",
            "services/gateway/scheduler",
        )
    ),
}
"""The measured code of each benchmark; NAME.SUBJECT has NAME's unless it is listed."""


def measured_by(name: str) -> MeasuredCode | None:
    """Return the code that the figures of a result measure; None if it is not declared."""
    return MEASURED.get(name, MEASURED.get(name.partition(".")[0]))


def snapshot(name: str) -> dict[str, Any] | None:
    """Return the `lines` of the code that a result measures, and a `sample` of them: hashes, joined.

    The working directory is the repository. None if the code is not declared or is not there.
    """
    measured = measured_by(name)
    found = lines_of(measured.paths) if measured else frozenset()
    return {"lines": len(found), "sample": "".join(sorted(found)[:_SAMPLE])} if found else None


def lines_of(paths: Sequence[str]) -> frozenset[str]:
    """Return the hashes of the lines of Python files, and of all Python files in folders."""
    roots = [Path(path).absolute() for path in paths]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))]
    return frozenset[str]().union(*(_lines(file.read_text()) for file in files))


@cache
def _lines(source: str) -> frozenset[str]:
    lines = [line.strip() for line in source.split("\n")]
    # A file that cannot be parsed keeps its docstrings, so that no benchmark loses its result.
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                    span = slice(node.lineno - 1, node.end_lineno)
                    lines[span] = [""] * len(lines[span])
    return frozenset(_hash(line) for line in lines if line and not line.startswith("#"))


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:_DIGITS]


def changed_share(name: str, code: Mapping[str, Any] | None) -> float | None:
    """Return the share of the measured lines that have changed since `code`, a snapshot; None if that is unknown.

    Removed lines are a share of the old code, new lines a share of today's; the larger share is returned.
    """
    measured = measured_by(name)
    if measured is None or not code:
        return None
    today, digits = lines_of(measured.paths), code["sample"]
    sample = [digits[place : place + _DIGITS] for place in range(0, len(digits), _DIGITS)]
    kept = sum(line in today for line in sample) / len(sample)
    return 1 - kept * code["lines"] / max(code["lines"], len(today))


def mark(name: str, changed: float | None) -> str:
    """Return the mark of stale figures, such as "older code"; "" if the figures are not stale."""
    measured = measured_by(name)
    if measured is None or changed is None:
        return "unknown code"
    passed = [share for share in (measured.share, *_MARKED) if changed > share]
    return f"older code: over {100 * max(passed):.0f} % of the lines have changed since" if passed else ""
