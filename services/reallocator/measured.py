"""What an instance's reports say of its speed. Pure: times are passed in (monotonic seconds)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(slots=True)
class MoveCost:
    """What moves cost of late: engine steps that a sample missed, and seconds of copying for each of its tokens."""

    stall_steps: float = 2.0
    seconds_per_token: float = 0.0
    moves: int = 0

    def observe(self, stall_steps: float, copy_seconds: float, tokens: int) -> None:
        """A move was made. What it cost is cut to bounds, so that one freak does not end all moves."""
        weight = 0.2
        self.moves += 1
        self.stall_steps += (min(max(stall_steps, 0.5), 50.0) - self.stall_steps) * weight
        self.seconds_per_token += (max(0.0, copy_seconds) / max(1, tokens) - self.seconds_per_token) * weight
