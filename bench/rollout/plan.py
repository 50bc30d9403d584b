"""The order of cells, and how long those that are left will take. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from bench.rollout.cells import CellName
from bench.rollout.registry import PLAIN

_FIRST_GUESS = 90.0
"""Seconds of a cell, where none of its kind was measured."""


def planned(systems: Sequence[str], regimes: Sequence[str], rounds: int) -> list[CellName]:
    """Return the cells in their order: all systems of a regime in a row, so that a round is paired in time.

    Plain decoding leads the first round, since the trainer's time is taken from it; every other round goes through
    the systems backwards.
    """
    others = [name for name in systems if name != PLAIN]
    order = [PLAIN, *others]
    return [
        CellName(system, regime, number)
        for number in range(rounds)
        for regime in regimes
        for system in (reversed(order) if number % 2 else order)
    ]


def seconds_left(left: Iterable[CellName], known: Mapping[CellName, float]) -> float:
    """Return how long cells will take: as their like in another round, or else as the others did."""
    like: dict[tuple[str, str], float] = {(name.system, name.regime): took for name, took in known.items()}
    typical = fmean(known.values()) if known else _FIRST_GUESS
    return sum(like.get((name.system, name.regime), typical) for name in left)
