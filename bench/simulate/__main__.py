"""Simulate the capacity of clusters: step times on 8 to 4,096 instances, and the fewest instances for deadlines.

Takes about four minutes on one core. Writes runs/bench/simulate.json.

    python -m bench.simulate [--samples 100000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from bench.report import format_value, option_parser, show_rows, write
from services.bubbles.config import BubblesConfig
from services.reallocator.config import ReallocatorConfig
from services.simulator.capacity import SimulationProgress, instances_for, last_step
from services.simulator.device_tables import known_devices
from services.simulator.simulation_setup import (
    PREGENERATED,
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)

INSTANCES = (8, 64, 512, 1000, 4096)
DEVICES = ("8B H100", "70B 8xH100")
# Deadlines, as shares of plain decoding's time on as many instances as run all samples at once.
DEADLINES = (1.25, 2.0, 4.0)
_SAMPLES = 16
_DECISION_STEPS = 64


def simulated(samples: int) -> dict[str, Any]:
    """Return the steps by device, method and number of instances, and the instances for deadlines."""
    known = {each.name: each for each in known_devices()}
    lengths = LogNormalLengths(2000, 0.8, 16384)
    work = SimulatedWorkload(lengths, samples // _SAMPLES, _SAMPLES, 256)
    found: dict[str, Any] = {"samples": work.prompts * _SAMPLES, "lengths": asdict(lengths), "steps": []}
    plain = SimulationSetup(known[DEVICES[0]], 1, work)
    for name in DEVICES:
        for count in INSTANCES:
            found["steps"].append(_step(name, "plain", replace(plain, device=known[name], instances=count)))
    for method, setup in _methods(plain).items():
        found["steps"].append(_step(DEVICES[0], method, replace(setup, instances=1000)))
    found["deadlines"] = [_deadline(plain, found["steps"], share) for share in DEADLINES]
    return found


def _methods(plain: SimulationSetup) -> dict[str, SimulationSetup]:
    """Return the setups by method: suffix drafts, moves, pre-generation in a minute of update, and all three."""
    drafts = (SimulatedSource("suffix", 0.6),)
    moves = ReallocatorConfig.model_construct(decision_steps=_DECISION_STEPS)
    filled = replace(
        plain,
        steps=2,
        pregenerated=SimulatedSource(PREGENERATED, 0.9),
        bubbles=BubblesConfig.model_construct(),
        update_seconds=60.0,
    )
    return {
        "suffix drafts": replace(plain, sources=drafts),
        "moves": replace(plain, reallocation=moves),
        "pre-generation": filled,
        "all of them": replace(filled, sources=drafts, reallocation=moves),
    }


def _step(device: str, method: str, setup: SimulationSetup) -> dict[str, Any]:
    began = time.monotonic()
    step = last_step(setup, SimulationProgress(setup.samples))
    took = time.monotonic() - began
    return {
        "device": device,
        "method": method,
        "instances": setup.instances,
        "simulated_in_seconds": took / setup.steps,
        **asdict(step),
        "tokens_per_second": step.tokens_per_second,
    }


def _deadline(setup: SimulationSetup, steps: list[dict[str, Any]], share: float) -> dict[str, Any]:
    soonest = min(
        each["seconds"] for each in steps if each["device"] == DEVICES[0] and each["method"] == "plain"
    )
    answer = instances_for(setup, share * soonest, on_end=SimulationProgress(8 * setup.samples))
    return {
        "device": DEVICES[0],
        "deadline": answer.deadline,
        "instances": answer.instances,
        "seconds": None if answer.instances is None else answer.tried[answer.instances].seconds,
        "tried": sorted(answer.tried),
    }


def tables(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of steps and of deadlines."""
    columns = (
        "device",
        "method",
        "instances",
        "step s",
        "bubble s",
        "longest",
        "busy",
        "tokens/s",
        "simulated in s",
    )
    keys = (
        "seconds",
        "bubble_seconds",
        "longest_bubble",
        "busy",
        "tokens_per_second",
        "simulated_in_seconds",
    )
    steps = [
        (each["device"], each["method"], f"{each['instances']:,}", *(_figure(each[key]) for key in keys))
        for each in found["steps"]
    ]
    deadlines = [
        (format_value(each["deadline"]), str(each["instances"]), format_value(each["seconds"]))
        for each in found["deadlines"]
    ]
    return {
        "capacity": {"columns": columns, "rows": steps},
        "deadlines": {"columns": ("deadline s", "instances", "step s"), "rows": deadlines},
    }


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else format_value(value)


def main() -> None:
    """Simulate, then show and write the tables."""
    given = _arguments()
    found = simulated(given.samples)
    made = tables(found)
    titles = (f"a step of {found['samples']:,} samples", f"instances for a deadline: {DEVICES[0]}, plain")
    for title, table in zip(titles, made.values(), strict=True):
        show_rows(title, table["columns"], table["rows"])
    write("simulate", {"capacity": found, "tables": made})


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--samples", type=int, default=100_000, help="samples of the step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
