"""Timeline of one instance in one step: its own samples, those of the next step, idle time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from examples.tinymath.background import Stretch
from examples.tinymath.records import StepRecord
from examples.tinymath.spans import SampleSpan, active_samples, by_instance

_SHORTEST = 1e-3
"""Seconds; a shorter bubble is not shown."""

Interval = tuple[float, float]
"""From when to when, in seconds."""
Curve = tuple[list[float], list[int]]
"""Times, and how many samples are active from each time to the next."""


@dataclass(frozen=True, slots=True)
class InstanceLane:
    """One instance in one step; times are seconds from the begin of the step."""

    own: Curve
    """Samples of the step."""
    background: Curve
    """Samples of the next step."""
    idle: list[Interval]
    """From when to when it did nothing."""

    @property
    def peak(self) -> int:
        """Most samples at a time."""
        return max([0, *self.own[1], *self.background[1]])


def lane(record: StepRecord, instance_id: str) -> InstanceLane:
    """Return an instance's timeline from the begin of a step until the new weights served."""
    own = by_instance(record.spans).get(instance_id, [])
    ahead = [
        SampleSpan(instance_id, stretch.begin, stretch.end)
        for stretch in record.background
        if stretch.instance_id == instance_id
        for _ in range(stretch.samples)
    ]
    idle = gaps(busy(record, instance_id), record.seconds)
    return InstanceLane(active_samples(own), active_samples(ahead), idle)


def busy(record: StepRecord, instance_id: str) -> list[Interval]:
    """Intervals in which the instance worked, on samples of the step or ahead; they may overlap."""
    worked: list[SampleSpan | Stretch] = [*record.spans, *record.background]
    return [(each.begin, each.end) for each in worked if each.instance_id == instance_id]


def gaps(intervals: Iterable[Interval], end: float) -> list[Interval]:
    """Return the complement of intervals within 0 to `end`."""
    found, reached = [], 0.0
    for left, right in [*sorted(intervals), (end, end)]:
        if min(left, end) - reached > _SHORTEST:
            found.append((reached, min(left, end)))
        reached = max(reached, right)
    return found
