"""Attempts of a run: a trainer that was started again, under the same run, does steps again. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

from paceline.report.facts import RunStep


def number_attempts(steps: Sequence[RunStep]) -> None:
    """Set `attempt` and `replaced` of each step; they are in order of their ends.

    An attempt begins with a step whose number, or a higher one, was over before. Steps that overlap are of one
    attempt, in whatever order they end, and so are several batches of a step under one policy version. An attempt
    replaces the steps of earlier ones from its lowest number on.
    """
    attempt, ends, highest = 1, list[float](), list[tuple[int, int]]()
    for step in steps:
        before = bisect_right(ends, step.begun)
        if before and _goes_back(step, *highest[before - 1]):
            attempt, ends, highest = attempt + 1, [], []
        step.attempt = attempt
        ends.append(step.ended)
        mine = (step.step, step.version)
        highest.append(max(highest[-1], mine) if highest else mine)
    lowest = float("inf")
    for _, group in groupby(reversed(steps), key=lambda each: each.attempt):
        members = list(group)
        for step in members:
            step.replaced = step.step >= lowest
        lowest = min(lowest, *(step.step for step in members))


def counted(steps: Sequence[RunStep]) -> list[RunStep]:
    """Return the steps that no later attempt replaced."""
    return [step for step in steps if not step.replaced]


def _goes_back(step: RunStep, number: int, version: int) -> bool:
    return step.step < number or (step.step == number and step.version != version)
