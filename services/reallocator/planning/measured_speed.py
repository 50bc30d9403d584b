"""Compute the speed of instances from their reports. Pure: times are passed in (monotonic seconds)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.reallocator.planning.throughput import ThroughputCurve


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """Counters of an instance at one time."""

    at: float
    samples: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SteadyPace:
    """Steps, step time, and tokens per step and sample between two reports with the same `samples`."""

    samples: int
    steps: int
    step_seconds: float
    tokens_per_step: float


def pace(before: InstanceReport, after: InstanceReport) -> SteadyPace | None:
    """Return the pace between two reports.

    None if the number of samples changed, no step was made, or the counters were reset.
    """
    steps, tokens, seconds = after.steps - before.steps, after.tokens - before.tokens, after.at - before.at
    if before.samples != after.samples or after.samples < 1 or steps < 1 or tokens < 0 or seconds <= 0:
        return None
    return SteadyPace(after.samples, steps, seconds / steps, max(1.0, tokens / steps / after.samples))


def steady(reports: Sequence[InstanceReport], since: float = float("-inf")) -> SteadyPace | None:
    """Return the pace over the last reports since `since` that have the same number of samples."""
    found: list[InstanceReport] = []
    for report in reversed(reports):
        if report.at < since or report.samples != reports[-1].samples:
            break
        found.append(report)
    return pace(found[-1], found[0]) if found else None


def tokens_per_second(before: InstanceReport, after: InstanceReport) -> float:
    """Return the tokens per second between two reports, whatever happened in between; 0 if unknown."""
    seconds, tokens = after.at - before.at, after.tokens - before.tokens
    return tokens / seconds if seconds > 0 and tokens > 0 else 0.0


def step_seconds(before: InstanceReport, after: InstanceReport) -> float:
    """Return the mean seconds of an engine step between two reports; 0 if unknown."""
    seconds, steps = after.at - before.at, after.steps - before.steps
    return seconds / steps if seconds > 0 and steps > 0 else 0.0


def settled(reports: Sequence[InstanceReport], since: float = float("-inf")) -> list[InstanceReport]:
    """Return the last reports since `since` between which the instance was busy, or idle, all the time.

    The first busy report is left out: the work began at an unknown time before it.
    """
    found: list[InstanceReport] = []
    for report in reversed(reports):
        if report.at < since or bool(report.samples) != bool(reports[-1].samples):
            break
        found.append(report)
    began = len(found) < len(reports) and reports[-len(found) - 1].at >= since
    if found and found[0].samples and (began or len(found) == len(reports)):
        found.pop()
    return found[::-1]


def mean_samples(reports: Sequence[InstanceReport]) -> float:
    """Return the mean number of samples over these reports; 0 of none."""
    return sum(each.samples for each in reports) / len(reports) if reports else 0.0


def lost_seconds(before: InstanceReport, after: InstanceReport, step_seconds: float) -> float | None:
    """Return the engine time that steps of `step_seconds` each do not explain; None if it was idle."""
    if not before.samples or not after.samples or step_seconds <= 0 or after.at <= before.at:
        return None
    return after.at - before.at - (after.steps - before.steps) * step_seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of a pair of instances, the longer of their step times, and the mean samples of each."""

    tokens_per_second: float
    step_seconds: float
    donor: float
    receiver: float


def achieved_gain(before: Speed, after: Speed, moved: int, curve: ThroughputCurve) -> float | None:
    """Return the gain in tokens per second over the same pair without the moves; None if too little is left.

    Samples end meanwhile, moved or not. The reference is therefore the pair with the moved samples that still run
    back at the donor: its throughput by the curve, scaled by how far the pair was from the curve before.
    """
    were, are = before.donor + before.receiver, after.donor + after.receiver
    predicted = _rate(curve, before.donor) + _rate(curve, before.receiver)
    if are < 1 or not were or predicted <= 0 or before.tokens_per_second <= 0:
        return None
    back = min(moved * min(1.0, are / were), after.receiver)
    unmoved = _rate(curve, after.donor + back) + _rate(curve, after.receiver - back)
    return after.tokens_per_second / (unmoved * before.tokens_per_second / predicted) - 1


def _rate(curve: ThroughputCurve, samples: float) -> float:
    """Return the tokens per second, interpolated between whole numbers of samples."""
    low = int(samples)
    share = samples - low
    return curve.throughput(low) * (1 - share) + (curve.throughput(low + 1) * share if share else 0.0)
