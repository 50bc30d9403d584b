"""By the throughput that RLHFSpec publishes (section 3.3, Figure 5), the plan moves what the paper moves."""

from __future__ import annotations

import numpy as np
import pytest

from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import Candidate, InstanceView, ReallocationRules
from services.reallocator.planning.throughput import ThroughputCurve

PUBLISHED = {1: 103.0, 6: 765.0, 19: 1415.0, 24: 1453.0}
"""Tokens a second of an instance with so many samples."""
THRESHOLD, MOVED, AFTER = 19, 5, 2180.0
_MOST, _CONTEXT = 64, 600


def published_curve() -> ThroughputCurve:
    """Step times between the published points; beyond the last they grow as between the last two."""
    counts = np.array(list(PUBLISHED), float)
    seconds = counts / np.array(list(PUBLISHED.values()))
    slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
    wanted = np.arange(1, _MOST + 1)
    found = np.interp(wanted, counts, seconds) + np.maximum(0.0, wanted - counts[-1]) * slope
    return ThroughputCurve(tuple(float(each) for each in found))


def view(name: str, samples: int, curve: ThroughputCurve) -> InstanceView:
    """An instance with room for all others, and samples that are equally long."""
    candidates = tuple(Candidate(f"{name}/{n}", _CONTEXT, 0.0, float(_CONTEXT), 38) for n in range(samples))
    return InstanceView(name, samples, _MOST - samples, 100_000, curve, THRESHOLD, candidates)


def test_five_of_24_samples_move_to_an_instance_with_one() -> None:
    curve = published_curve()
    moved = sum(
        len(each.moves) for each in plan([view("one", 24, curve), view("two", 1, curve)], ReallocationRules())
    )
    assert moved == MOVED
    assert curve.throughput(24 - moved) + curve.throughput(1 + moved) == pytest.approx(AFTER)
