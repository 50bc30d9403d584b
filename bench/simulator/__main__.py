"""RLHFSpec's reallocation, simulated beside what is published: `python -m bench.simulator`.

Figure 5 is compared at the moment of the decision; the rest is a whole generation stage of log-normal lengths, with
and without moves. Writes runs/bench/simulator.json.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

from bench.report import show, show_table, write
from bench.simulator.cluster import ReallocationSetup, SimulatedCluster
from bench.simulator.loads import (
    LMSYS_LIMIT,
    PUBLISHED_AFTER,
    PUBLISHED_BEFORE,
    dealt,
    lmsys_lengths,
    published_curve,
)
from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import Candidate, InstanceView, ReallocationRules

_PUBLISHED_THRESHOLD = 19
# Samples of a prompt, and how much their lengths have in common.
_GROUP, _ALIKE = 8, 0.8
_COLUMNS = (
    ("seconds", "seconds"),
    ("without", "seconds_without"),
    ("gain", "gain"),
    ("samples moved", "moved"),
    ("by prefix", "by_prefix"),
    ("decisions", "decisions"),
)


def main() -> None:
    """Simulate, show and write."""
    given = _arguments()
    figure = figure_5(_PUBLISHED_THRESHOLD) | {
        f"saturation_point_{name}": value for name, value in figure_5(None).items()
    }
    stages = {
        f"{instances} instances, {samples} samples each, {name}": stage(
            instances, samples, given.seeds, alike
        )
        for instances in (2, 4, 8)
        for samples in (16, 32)
        for name, alike in (("any lengths", 0.0), ("lengths by prompt", _ALIKE))
    }
    show("RLHFSpec's Figure 5", figure)
    show_table("generation stages, LMSYS lengths (published gain of reallocation: 1.19)", _COLUMNS, stages)
    write("simulator", {"figure_5": figure, "stages": stages})


def figure_5(threshold: int | None) -> dict[str, Any]:
    """24 + 1 samples: what is moved, and tokens a second before and after."""
    curve = published_curve()
    wanted = threshold or curve.saturation_point(ReallocationSetup().flatness) or len(curve.seconds)
    fleet = [
        InstanceView(
            name,
            count,
            64 - count,
            100_000,
            curve,
            wanted,
            tuple(Candidate(f"{name}/{n}", 400, remaining=400.0, blocks=25) for n in range(count)),
        )
        for name, count in (("ins1", 24), ("ins2", 1))
    ]
    transfers = plan(fleet, ReallocationRules())
    moved = sum(len(each.keys) for each in transfers)
    before = curve.throughput(24) + curve.throughput(1)
    after = curve.throughput(24 - moved) + curve.throughput(1 + moved)
    return {
        "threshold": wanted,
        "moved": moved,
        "tokens_per_second_before": before,
        "published_before": PUBLISHED_BEFORE,
        "tokens_per_second_after": after,
        "published_after": PUBLISHED_AFTER,
        "gain": after / before,
        "published_gain": PUBLISHED_AFTER / PUBLISHED_BEFORE,
    }


def stage(instances: int, samples: int, seeds: int, alike: float) -> dict[str, float]:
    """Means over seeds of a generation stage with and without moves, the samples of a prompt on one instance."""
    curve, found = published_curve(), []
    for seed in range(seeds):
        lengths = lmsys_lengths(instances * samples, seed, group=_GROUP, alike=alike)
        loads = dealt(lengths, instances, _GROUP)
        plain = SimulatedCluster(loads, curve).run()
        moved = SimulatedCluster(loads, curve, ReallocationSetup(limit=LMSYS_LIMIT)).run()
        found.append((plain, moved))
    return {
        "seconds": fmean(moved.seconds for _, moved in found),
        "seconds_without": fmean(plain.seconds for plain, _ in found),
        "gain": fmean(plain.seconds / moved.seconds for plain, moved in found),
        "moved": fmean(moved.moved for _, moved in found),
        "by_prefix": fmean(moved.by_prefix for _, moved in found),
        "decisions": fmean(moved.decisions for _, moved in found),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
