"""Rounds of engine steps, each step at the time that steps of its kind take. Pure.

On a busy machine the same round takes a tenth longer the next time, and the best of several plans is the luckiest
one. But plans make the same kinds of steps over and over: so many samples that verify about so many draft tokens.
So each step counts at the median time of its kind, over all plans and rounds, and what a plan does beside the
engine at the median of its rounds. A kind of few steps borrows from kinds that are nearly it: what is common would
else count at a calm machine's time, and what is rare at whatever the machine did just then. What a plan decides,
its mistakes and trials included, counts in full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

# Numbers of rows that differ by less than one of so many parts of an octave are of a kind.
_IN_OCTAVE = 16
# Steps that a median is taken over, where there are so many that are alike.
_ENOUGH = 15
# How far a kind borrows, in octaves of samples plus octaves of rows a sample.
_REACH = 0.5

Kind = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """An engine step: samples, draft tokens, and seconds of the engine alone."""

    samples: int
    drafted: int
    seconds: float

    @property
    def kind(self) -> Kind:
        """Steps of a kind take about as long."""
        if not self.drafted:
            return self.samples, 0
        return self.samples, 1 + round(_IN_OCTAVE * log2(1 + self.drafted / self.samples))


@dataclass(slots=True)
class TimedRound:
    """A plan's steps, and its seconds beside the engine: drafters, decisions, what is learned."""

    steps: list[TimedStep] = field(default_factory=list)
    beside: float = 0.0

    @property
    def seconds(self) -> float:
        """As measured."""
        return sum(step.seconds for step in self.steps) + self.beside


def step_times(rounds: Iterable[TimedRound]) -> dict[Kind, float]:
    """Return the median time of each kind of step, in seconds.

    A kind with less than 15 steps takes in the nearest kinds until there are as many, up to half an octave away.
    Plain steps and steps with drafts never count as alike.
    """
    times: dict[Kind, list[float]] = defaultdict(list)
    for each in rounds:
        for step in each.steps:
            times[step.kind].append(step.seconds)
    kinds = list(times)
    places = np.array([_place(kind) for kind in kinds]).reshape(-1, 2)
    return {kind: median(_alike(kind, times, kinds, places)) for kind in kinds}


def _place(kind: Kind) -> tuple[float, float]:
    samples, rows = kind
    # An engine that only clears up has no samples, and is an octave from all that have any.
    return (_IN_OCTAVE * log2(samples) if samples else -float(_IN_OCTAVE)), rows


def _alike(
    kind: Kind, times: Mapping[Kind, list[float]], kinds: Sequence[Kind], places: NDArray[np.float64]
) -> list[float]:
    """Return a kind's times, joined by those of its nearest kinds if it has few; ties join together."""
    if len(times[kind]) >= _ENOUGH:
        return times[kind]
    away = np.abs(places - _place(kind)).sum(axis=1)
    away[(places[:, 1] > 0) != (kind[1] > 0)] = np.inf
    found: list[float] = []
    reached = 0.0
    for index in np.argsort(away, kind="stable"):
        further = away[index] > reached
        if away[index] > _REACH * _IN_OCTAVE or (further and len(found) >= _ENOUGH):
            break
        reached = away[index]
        found += times[kinds[index]]
    return found


def accounted(rounds: Sequence[TimedRound], times: Mapping[Kind, float]) -> float:
    """Seconds of a plan's round, the mean of its rounds, each step at the time of its kind.

    KeyError for a kind that is not in `times`; ValueError without a round.
    """
    if not rounds:
        raise ValueError("a plan without a round takes no time")
    stepping = fmean(sum(times[step.kind] for step in each.steps) for each in rounds)
    return stepping + median(each.beside for each in rounds)
