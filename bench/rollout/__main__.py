"""Measure complete rollouts in one table: plain vLLM, its own methods, each paper's system, and Paceline.

A GRPO run of tinymath is recorded once: 12 steps of 16 prompts x 8 samples, over a pool of 64 prompts that recur
after four steps. Every system then replays it with the same weights and prompts and gives the same responses:
Paceline by its seeds, vLLM because its sampler is made to draw the recorded tokens (bench/rollout/told_tokens.py).
The trainer's update is a wait. It takes a quarter of plain decoding's step, and the same time for all systems.

The table is made of cells (system, regime, round). Each is kept under runs/bench/rollout with the hash of the code
and the run that it depends on, and a later call measures the missing ones. Writes runs/bench/rollout.json, or
rollout.SUBJECT.json if the first subject is not tinymath.

    python -m bench.rollout [--systems quick] [--rounds 1] [--minutes 25]
    python -m bench.rollout --systems without --regimes "long tail"            # each mechanism left out
    python -m bench.rollout --systems all --subjects tinymath tinymath-16m     # until no cell is left
    python -m bench.rollout --subjects smollm2       # a language model; recording its run alone takes an hour
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.report import option_parser, say, show_rows, write
from bench.rollout.cells import TableCell
from bench.rollout.markdown import shown
from bench.rollout.registry import EVERYTHING, OFF, PLAIN, REGIMES, SUBJECTS, SYSTEMS
from bench.rollout.session import CellSession
from bench.rollout.table import GOALS, PairedRatio, headline, rows, table_of, verdicts
from bench.simulate.verification import replays_off

QUICK, ALL, WITHOUT = "quick", "all", "without"


def main() -> None:
    """Measure missing cells, then show and write the table."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = arguments()
    results, left, began = {}, 0, time.monotonic()
    for name in given.subjects:
        subject = SUBJECTS[name]
        # The other subjects only run the quick systems.
        systems = chosen(given.systems if name == given.subjects[0] else [QUICK])
        regimes = [each for each in subject.regimes if each in given.regimes]
        minutes = given.minutes - (time.monotonic() - began) / 60
        session = CellSession(subject, systems, regimes, given.rounds, given.instances, minutes)
        results[name] = result_of(session.run())
        left += session.left
    first = results[given.subjects[0]]
    write_all(first, results, options=vars(given))
    if left:
        say(f"rollout: {left} cells are left; run the same command again to measure them")


def chosen(names: Sequence[str]) -> list[str]:
    """Return systems by name, or the quick form's systems, or all `without` systems, or all."""
    if QUICK in names:
        return [name for name, system in SYSTEMS.items() if system.quick]
    if WITHOUT in names:
        return [name for name in SYSTEMS if name in (PLAIN, EVERYTHING, OFF) or name.startswith(WITHOUT)]
    return list(SYSTEMS) if ALL in names else [name for name in SYSTEMS if name in names]


def result_of(cells: Sequence[TableCell]) -> dict[str, Any]:
    """Return the figures, the rows and the cells of a subject."""
    table = table_of(cells)
    figures = headline(
        table,
        vllm=[name for name, system in SYSTEMS.items() if system.vllm],
        recorded=[name for name, system in SYSTEMS.items() if system.recorded],
    )
    return {
        "figures": figures,
        "goals": verdicts(figures),
        "rows": rows(table, replays_off()),
        "absent": {
            f"{cell.name.system}, {cell.name.regime}": {"reason": cell.absent, "why": cell.why}
            for cell in cells
            if cell.absent is not None
        },
        "cells": [cell.to_json() for cell in cells],
    }


def write_all(
    first: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> None:
    """Show the figures of the first subject and write the figures of all subjects."""
    goals = first["goals"]
    show_rows(
        "rollout",
        ("figure", "value", "goal", ""),
        [
            (name, shown(first["figures"][name]), str(GOALS.get(name, 0)), found)
            for name, found in goals.items()
        ],
    )
    data = {
        **first["figures"],
        "goals": goals,
        "subjects": {name: _plain(result) for name, result in results.items()},
        "systems": {name: {"about": each.setup.about, "note": each.note} for name, each in SYSTEMS.items()},
        "regimes": {name: each.about for name, each in REGIMES.items()},
        "options": dict(options),
    }
    write(result_name(next(iter(results))), data)


def result_name(subject: str) -> str:
    """Return the name of the result of a call whose first subject this is."""
    return "rollout" if subject == next(iter(SUBJECTS)) else f"rollout.{subject}"


def _plain(value: Any) -> Any:
    """Return ratios as mappings, and all other values unchanged."""
    if isinstance(value, PairedRatio):
        return {**asdict(value), "interval": value.is_interval}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--systems", nargs="+", choices=[QUICK, ALL, WITHOUT, *SYSTEMS], default=[QUICK], metavar="NAME"
    )
    parser.add_argument("--regimes", nargs="+", choices=list(REGIMES), default=list(REGIMES))
    parser.add_argument(
        "--rounds", type=int, default=1, help="paired rounds; those before the last are kept ones"
    )
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS)[:1])
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=25.0, help="minutes after which no cell is begun")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
