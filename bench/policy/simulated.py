"""Simulate decisions on devices with known step times: decisions cost nothing, and figures are reproducible.

A cell is a known device (services/simulator/device_tables.py), a batch of 1 to 512 samples with contexts of 1k to
64k tokens whose KV fits, and drafts of which 2, 15, 40 or 95 % of the tokens are wrong. In each cell the modes of
an instance begin with a sweep of the device and nothing else. They are compared with plain decoding and with every
fixed draft length, over the first 32 steps and over the later ones; see `simulation`. A cell reports whether its
device's times are measured or from a data sheet. Writes runs/bench/policy.simulated.json.

    python -m bench.policy.simulated [--devices H100,B200] [--modes planner,toggle] [--seed 0] [--late 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from bench.policy.simulation import FIRST, FIXED, LATER, Cell, SimulatedBatch, fixed_rates
from bench.report import format_value, show_rows, write
from services.simulator.device_tables import DeviceTable, known_devices, swept
from services.step_time.estimator import warm_up

SAMPLES = (1, 4, 16, 64, 128, 256, 512)
CONTEXTS = (1024, 4096, 16384, 65536)
WRONG = (0.02, 0.15, 0.4, 0.95)
GOALS = {
    "planner_vs_best_fixed_min": 0.97,
    "planner_first_32_min": 0.9,
    "worst_vs_plain_first_32": 0.95,
    "worst_vs_plain": 0.98,
}
# The CPU's model has short contexts.
_LONGEST_ON_CPU = 4096


def main() -> None:
    """Simulate the cells, then show and write the figures."""
    arguments = _arguments()
    warm_up()
    rows = [
        row
        for device in known_devices()
        if not arguments.devices or any(name in device.name for name in arguments.devices)
        for row in cells(device, arguments.modes, seed=arguments.seed, late=arguments.late)
    ]
    figures = figures_of(rows)
    tables = sorted({row["device"] for row in rows})
    columns = ("device", "cells", *GOALS)
    by_device = [(name, [row for row in rows if row["device"] == name]) for name in tables]
    modes = len(arguments.modes)
    worst = [
        [name, str(len(some) // modes), *(format_value(figures_of(some).get(goal)) for goal in GOALS)]
        for name, some in by_device
    ]
    show_rows("policy, simulated: the worst cell of each device", columns, worst)
    goals = [
        (name, format_value(value), f">= {GOALS[name]}" if name in GOALS else "")
        for name, value in figures.items()
    ]
    show_rows("policy, simulated", ("figure", "value", "goal"), goals)
    shown = {"worst": {"columns": columns, "rows": worst}}
    write("policy.simulated", {**figures, "cells": rows, "steps": [FIRST, LATER], "tables": shown})


def cells(
    device: DeviceTable, modes: Sequence[str], samples: Sequence[int] = SAMPLES, seed: int = 0, late: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the figures of the cells of a device, for each mode."""
    sweep = swept(device, max(SAMPLES), seed)
    for n in samples:
        for context in CONTEXTS:
            if n * context > device.kv_tokens or (not device.graphs and context > _LONGEST_ON_CPU):
                continue
            for wrong in WRONG:
                cell = Cell(device, n, context, wrong)
                fixed = {length: fixed_rates(cell, length) for length in (0, *FIXED)}
                best = max(fixed, key=lambda length: fixed[length].later)
                for mode in modes:
                    rates = SimulatedBatch(cell, mode, sweep, late, seed).rates()
                    yield {
                        "device": device.name,
                        "source": device.source,
                        "samples": n,
                        "context": context,
                        "wrong": wrong,
                        "mode": mode,
                        "best_fixed": best,
                        "best_vs_plain": fixed[best].later / fixed[0].later,
                        "first_vs_best": rates.first / max(each.first for each in fixed.values()),
                        "later_vs_best": rates.later / fixed[best].later,
                        "first_vs_plain": rates.first / fixed[0].first,
                        "later_vs_plain": rates.later / fixed[0].later,
                    }


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the planner's figures with goals, and the worst and the median cell of every other mode."""
    planned = [row for row in rows if row["mode"] == "planner"]
    figures = {}
    if planned:
        figures = {
            "planner_vs_best_fixed_min": min(row["later_vs_best"] for row in planned),
            "planner_first_32_min": min(row["first_vs_best"] for row in planned),
            "worst_vs_plain_first_32": min(row["first_vs_plain"] for row in planned),
            "worst_vs_plain": min(row["later_vs_plain"] for row in planned),
        }
    for mode in sorted({row["mode"] for row in rows} - {"planner"}):
        some = [row for row in rows if row["mode"] == mode]
        figures[f"{mode}_worst_vs_plain"] = min(row["later_vs_plain"] for row in some)
        figures[f"{mode}_vs_best_fixed_median"] = median(row["later_vs_best"] for row in some)
    return figures


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=_names, default=[], help="parts of their names; all by default")
    parser.add_argument("--modes", type=_names, default=["planner", "toggle", "solver", "adaptive"])
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise and of the accepted tokens")
    parser.add_argument(
        "--late",
        type=int,
        default=0,
        help="decisions made before the outcomes and the time of a step are known",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
