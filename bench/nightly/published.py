"""Keep committed figures in bench/results/NAME.json: what the documents show, without the raw measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.measured_code import changed_share, mark

RESULTS = Path("bench/results")
_KEPT = ("goals", "machine", "measured_at", "code", "systems", "regimes", "options", "tables")
"""Keys that are kept in addition to single figures."""
_SUBJECT = ("figures", "goals", "rows", "absent")
"""Keys that are kept of a subject of the rollout benchmark."""


def reduced(result: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return the committed part of a result: single figures, goals, the machine, and rows of the rollout table."""
    figures = {name: value for name, value in result.items() if is_figure(value) and name not in _KEPT}
    kept = {name: result[name] for name in _KEPT if name in result}
    subjects = {
        name: {part: subject[part] for part in _SUBJECT}
        for name, subject in result.get("subjects", {}).items()
    }
    return {"command": command, "figures": figures, **kept, **({"subjects": subjects} if subjects else {})}


def is_figure(value: Any) -> bool:
    """Return True for a number, and for None in the place of one."""
    return value is None or isinstance(value, int | float)


def publish(
    name: str, command: str | None = None, results: Path = RESULTS, runs: Path = Path("runs/bench")
) -> None:
    """Publish the figures of a benchmark's last run to `results`. OSError if it has written none.

    `command` produced the figures; None stands for `make bench` with the rounds of the run.
    """
    result = json.loads((runs / f"{name}.json").read_text())
    results.mkdir(parents=True, exist_ok=True)
    kept = reduced(result, command_of(name, result) if command is None else command)
    (results / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def command_of(name: str, result: Mapping[str, Any]) -> str:
    """Return the `make bench` command that reproduces a result; NAME.SUBJECT is a result of that subject."""
    rounds = result.get("options", {}).get("rounds", 1)
    subjects = result.get("subjects", {})
    benchmark, _, subject = name.rpartition(".")
    what = f"NAME={benchmark} SUBJECT={subject}" if subject in subjects else f"NAME={name}"
    return f"make bench {what}" + (f' BENCH_ARGS="--rounds {rounds}"' if rounds > 1 else "")


def published(results: Path = RESULTS) -> dict[str, Any]:
    """Return all committed figures, by benchmark, with the changed share of their code and its mark."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    changed = {name: changed_share(name, result.get("code")) for name, result in found.items()}
    return {
        name: {**result, "changed": changed[name], "mark": mark(name, changed[name])}
        for name, result in found.items()
    }
