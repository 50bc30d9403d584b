"""Measure the host's part of an engine step: what the loop does before and after vLLM's core.

Drafters, planner, engine and loop of an instance run a batch of samples. vLLM's core is replaced by one that knows
the texts (host.py): no scheduler, model or sampler runs. Figures are medians over the steps of the processor
time of the engine's thread. With `--off-ratio` two real engines of tinymath, the coupled one without drafts and
vLLM's own, take turns on one core, and `off_step_ratio` compares the processor time of their steps. Writes
runs/bench/host_step.json.

    python -m bench.host_step [--steps 200] [--rounds 3] [--off-ratio 7]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import median
from typing import Any

from bench.report import format_value, option_parser, show_rows, write

SAMPLES = (1, 64, 256)
VOCABULARIES = (49_152, 151_936)
GOALS = {"host_us_1": "<= 60", "host_us_64": "<= 150", "host_us_256": "<= 350", "off_step_ratio": "<= 1.02"}
_DEVICE = "8B H100"
"""Device whose step times the planner sees."""
COLUMNS = (
    "samples",
    "vocabulary",
    "drafters",
    "drafting",
    "engine",
    "loop",
    "host, us",
    "tokens",
    "functions",
)
_PARTS = ("drafting_us", "engine_us", "loop_us", "host_us", "tokens_per_step", "functions")


def main() -> None:
    """Measure every case and the ratio, then show and write the figures."""
    given = arguments()
    ratio: Mapping[str, float] = {}
    if given.off_ratio:
        from bench.host_step.off_ratio import off_ratio

        ratio = off_ratio(given.off_ratio)
    rows = cases(given.steps, given.rounds)
    table = show_rows(
        "host_step: medians, in microseconds of processor time", COLUMNS, [_shown(r) for r in rows]
    )
    found: dict[str, Any] = {**figures(rows), **ratio}
    goals = [(name, format_value(value), GOALS.get(name, "")) for name, value in found.items()]
    show_rows("host_step: figures", ("figure", "value", "goal"), goals)
    write("host_step", {**found, "goals": GOALS, "rows": rows, "tables": {"parts": table}})


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="measured steps of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of whose medians the median is shown")
    parser.add_argument("--off-ratio", type=int, default=7, help="rounds of the two engines; 0 starts none")
    return parser.parse_args()


def cases(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each batch: with references at each vocabulary, with all drafters, and with none."""
    # After vLLM, which numba must not precede.
    from bench.host_step.host import HostCase, measure, warm_up
    from services.simulator.device_tables import devices

    warm_up()
    device = next(each for each in devices() if each.name == _DEVICE)
    found = []
    for samples in SAMPLES:
        wanted = [HostCase(samples, vocabulary) for vocabulary in VOCABULARIES]
        wanted += [
            HostCase(samples, VOCABULARIES[0], ("reference", "suffix")),
            HostCase(samples, VOCABULARIES[0], ()),
        ]
        for case in wanted:
            measured = [measure(case, device, steps).figures() for _ in range(rounds)]
            row = {name: median(each[name] for each in measured) for name in measured[0]}
            drafters = " and ".join(case.drafters) or "none"
            found.append({"samples": samples, "vocabulary": case.vocabulary, "drafters": drafters, **row})
    return found


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures with names: references at the larger vocabulary, all drafters, and none."""
    names = {"reference": "host_us", "reference and suffix": "host_us_all_drafters", "none": "off_host_us"}
    return {f"{names[row['drafters']]}_{row['samples']}": row["host_us"] for row in rows}


def _shown(row: Mapping[str, Any]) -> list[str]:
    return [format_value(row[name]) for name in ("samples", "vocabulary", "drafters", *_PARTS)]


if __name__ == "__main__":
    main()
