"""Capacity of clusters, and the papers' tables beside what is simulated: `python -m bench.simulate`.

Capacity: a step of 100,000 samples on 8 to 4,096 instances, plainly and with the services' methods, and the fewest
instances for deadlines. Replays: see the modules of the papers. Writes runs/bench/simulate.json.

    python -m bench.simulate [--only capacity,bubblespec,rlhfspec,efficientrollout,respec] [--samples 100000]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.report import format_value, show_rows, write
from bench.simulate import bubblespec, capacities, efficientrollout, respec, rlhfspec
from bench.simulate.replay import ReplayedCell, errors

REPLAYS: Mapping[str, Callable[[], list[ReplayedCell]]] = {
    "bubblespec": bubblespec.replay,
    "rlhfspec": rlhfspec.replay,
    "efficientrollout": efficientrollout.replay,
    "respec": respec.replay,
}
# Seconds that each part takes, about, on one core.
_TAKES = {"capacity": 240.0, "bubblespec": 90.0, "rlhfspec": 10.0, "efficientrollout": 20.0, "respec": 12.0}


def main() -> None:
    """Simulate, show and write; parts that are left out keep the figures that they have."""
    given = _arguments()
    path = Path("runs/bench/simulate.json")
    figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    left = [name for name in _TAKES if name in given.only]
    while left:
        name, seconds = left[0], sum(_TAKES[each] for each in left)
        print(f"{name} is simulated; about {seconds:.0f} s left", file=sys.stderr, flush=True)
        began = time.monotonic()
        if name == "capacity":
            figures[name] = capacities.simulated(given.samples)
            capacities.show(figures[name])
        else:
            figures[name] = _replayed(REPLAYS[name]())
        figures[name]["took_seconds"] = time.monotonic() - began
        left.pop(0)
    kept = {key: value for key, value in figures.items() if key in _TAKES}
    made = {"tables": capacities.tables(kept["capacity"])} if "capacity" in kept else {}
    write("simulate", kept | made)


def _replayed(cells: Sequence[ReplayedCell]) -> dict[str, Any]:
    """Show the tables of a paper, and return their cells with the error of each table."""
    found: dict[str, Any] = {}
    for table in dict.fromkeys(each.table for each in cells):
        part = [each for each in cells if each.table == table]
        show_rows(
            table,
            ("row", "figure", "published", "simulated", "error"),
            [
                (
                    each.row,
                    each.figure,
                    format_value(float(each.published)),
                    format_value(float(each.simulated)),
                    "fitted" if each.fitted else f"{each.error:+.0%}",
                )
                for each in part
            ],
        )
        found[table] = {
            "errors": errors(part),
            "cells": [asdict(each) | {"error": each.error} for each in part],
        }
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(_TAKES))
    parser.add_argument(
        "--samples", type=int, default=100_000, help="of the step whose capacity is asked for"
    )
    given = parser.parse_args()
    if unknown := set(given.only) - set(_TAKES):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(_TAKES)}")
    return given


if __name__ == "__main__":
    main()
