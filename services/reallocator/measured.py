"""What an instance's reports say of its speed. Pure: times are passed in (monotonic seconds)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.reallocator.threshold import Curve


@dataclass(frozen=True, slots=True)
class Report:
    """Counters of an instance at a time."""

    at: float
    samples: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pace:
    """An instance between two reports: `samples` throughout, so many engine steps, seconds of each, and tokens
    that a step brought each sample."""

    samples: int
    steps: int
    step_seconds: float
    tokens_per_step: float


def pace(before: Report, after: Report) -> Pace | None:
    """The pace between two reports; None where nothing steady can be told: the number of samples changed, nothing
    happened, or the counters began anew."""
    steps, tokens, seconds = after.steps - before.steps, after.tokens - before.tokens, after.at - before.at
    if before.samples != after.samples or after.samples < 1 or steps < 1 or tokens < 0 or seconds <= 0:
        return None
    return Pace(after.samples, steps, seconds / steps, max(1.0, tokens / steps / after.samples))


def steady(reports: Sequence[Report], since: float = float("-inf")) -> Pace | None:
    """The pace over the last of these reports that have the same number of samples, none before `since`."""
    found: list[Report] = []
    for report in reversed(reports):
        if report.at < since or report.samples != reports[-1].samples:
            break
        found.append(report)
    return pace(found[-1], found[0]) if found else None


def tokens_per_second(before: Report, after: Report) -> float:
    """Of an instance between two reports, whatever happened in between; 0 where that cannot be told."""
    seconds, tokens = after.at - before.at, after.tokens - before.tokens
    return tokens / seconds if seconds > 0 and tokens > 0 else 0.0


def step_seconds(before: Report, after: Report) -> float:
    """Seconds of an engine step between two reports; 0 where that cannot be told."""
    seconds, steps = after.at - before.at, after.steps - before.steps
    return seconds / steps if seconds > 0 and steps > 0 else 0.0


def settled(reports: Sequence[Report], since: float = float("-inf")) -> list[Report]:
    """The last of these reports, none before `since`, between which the instance was at work all the time, or idle
    all the time. The first report of work is left out: somewhere before it the work began."""
    found: list[Report] = []
    for report in reversed(reports):
        if report.at < since or bool(report.samples) != bool(reports[-1].samples):
            break
        found.append(report)
    began = len(found) < len(reports) and reports[-len(found) - 1].at >= since
    if found and found[0].samples and (began or len(found) == len(reports)):
        found.pop()
    return found[::-1]


def mean_samples(reports: Sequence[Report]) -> float:
    """Over these reports; 0 of none."""
    return sum(each.samples for each in reports) / len(reports) if reports else 0.0


def lost_seconds(before: Report, after: Report, step_seconds: float) -> float | None:
    """Engine time that cannot be explained by its steps, of so many seconds each. None where the engine was
    idle."""
    if not before.samples or not after.samples or step_seconds <= 0 or after.at <= before.at:
        return None
    return after.at - before.at - (after.steps - before.steps) * step_seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """A pair of instances over a while: tokens a second together, the longer of their engine steps, and their mean
    samples."""

    tokens_per_second: float
    step_seconds: float
    donor: float
    receiver: float


def achieved_gain(before: Speed, after: Speed, moved: int, curve: Curve) -> float | None:
    """Tokens a second of the pair against those that it would have had without the moves, as a share; None where
    nothing is left to compare.

    Samples end meanwhile, moved or not, so the pair is compared with one on which the moved ones that are left were
    still where they came from: by the curve, as far from it as the pair was before.
    """
    were, are = before.donor + before.receiver, after.donor + after.receiver
    predicted = _rate(curve, before.donor) + _rate(curve, before.receiver)
    if are < 1 or not were or predicted <= 0 or before.tokens_per_second <= 0:
        return None
    back = min(moved * min(1.0, are / were), after.receiver)
    unmoved = _rate(curve, after.donor + back) + _rate(curve, after.receiver - back)
    return after.tokens_per_second / (unmoved * before.tokens_per_second / predicted) - 1


def _rate(curve: Curve, samples: float) -> float:
    """Tokens a second, between whole numbers of samples too."""
    low = int(samples)
    share = samples - low
    return curve.throughput(low) * (1 - share) + (curve.throughput(low + 1) * share if share else 0.0)
