"""Pauses in decoding, from the times of an engine's steps. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Span:
    """Begin and end of a step, or of weights being applied, in monotonic seconds."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Length."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Steps of an engine, and the times at which it applied weights, each in order."""

    steps: Sequence[Span]
    applied: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of decoding during a push, in milliseconds.

    `usual_step` and `usual_gap` are the medians before it. `gap` is the longest time in which no step ran.
    `prefill` is the step after the weights were applied, which computes the KV again; `slowest_step` the longest
    of the others.
    """

    usual_step: float
    usual_gap: float
    gap: float
    apply: float
    prefill: float
    step_while_staging: float
    slowest_step: float


def parse(lines: Iterable[str]) -> EngineTimes:
    """Return the times that the lines of an instance's file tell; a last one that is not whole is left out."""
    found: dict[str, list[Span]] = {"step": [], "apply": []}
    for line in lines:
        if line.endswith("\n"):
            name, began, ended = line.split()
            found[name].append(Span(float(began), float(ended)))
    return EngineTimes(found["step"], found["apply"])


def pauses(times: EngineTimes, began: float, ended: float) -> Pauses:
    """Return how decoding went on during a push. ValueError: it did not decode before, during or after it."""
    before = [step for step in times.steps if step.ended <= began]
    rest = [step for step in times.steps if step.ended > began]
    applied = next((each for each in times.applied if began <= each.began <= ended), None)
    if len(before) < 2 or applied is None:
        raise ValueError("the engine did not decode before the push, or applied no weights in it")
    first_after = next((place for place, step in enumerate(rest) if step.began >= applied.ended), None)
    if first_after is None or first_after + 1 >= len(rest):
        raise ValueError("the engine did not decode after the push")
    during = [step for step in rest if step.began < max(ended, rest[first_after].ended)]
    staging = rest[:first_after]
    others = [step for place, step in enumerate(during) if place != first_after]
    gaps = [second.began - first.ended for first, second in pairwise([before[-1], *during])]
    return Pauses(
        usual_step=1000 * statistics.median(step.seconds for step in before),
        usual_gap=1000 * statistics.median(b.began - a.ended for a, b in pairwise(before)),
        gap=1000 * max(gaps),
        apply=1000 * applied.seconds,
        prefill=1000 * rest[first_after].seconds,
        step_while_staging=1000 * statistics.median(step.seconds for step in staging or before),
        slowest_step=1000 * max((step.seconds for step in others), default=0.0),
    )
