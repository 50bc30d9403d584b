"""Simulate decoding on a device with known step times: a batch draws tokens with given drafts. Deterministic.

The modes decide with their real code, on the estimator's own prior: a sweep of the simulated device. Every token of
a draft is wrong with the same probability. Acceptance is learned as the reference drafter learns it; a small batch
is the tail of a larger one that it has learned from. Samples do not end and their context does not grow, so that a
cell is a single question. Drafting and planning take no time here.

A way of decoding is rated by the tokens that its drafts bring on average, not by the tokens that happened to be
accepted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.contracts.knobs import Knobs
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.acceptance.table import AcceptanceTable
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.plan import StepShape
from services.generation.speculation.planner import KnobDrivenPlanner
from services.simulator.device_tables import NOISE, DeviceTable
from services.step_time.estimator import StepTimeEstimator
from services.step_time.sweep import MeasuredStep

WINDOW = 16
FIXED = (1, 2, 4, 8, 12, 16)
FIRST, LATER = 32, 64
"""Steps of a cold start, and the later steps that are rated."""
_MARGIN = 0.02
# The reference drafter's initial table.
_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 1 << 30)
_PRIORS = (0.35, 0.55, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.96, 0.96, 0.96)
_RAMP = np.array([bisect_right(_BUCKETS, k) - 1 for k in range(64)], np.int64)
# A batch of fewer than `_ALONE` samples is the tail of a larger one: the drafter has seen `_SEEN` tokens.
_ALONE, _SEEN = 16, 512
_TOKENS = np.ones((512, WINDOW), np.int32)


@dataclass(frozen=True, slots=True)
class Cell:
    """A device, `samples` samples of `context` tokens, and the share of wrong tokens in their drafts."""

    device: DeviceTable
    samples: int
    context: int
    wrong: float

    def seconds(self, rows: int, step: int = 0) -> float:
        """Return the true time of a step."""
        device = self.device
        if device.slowed is not None and step >= FIRST:
            device = device.slowed
        return device.seconds(self.samples, rows, self.samples * self.context)

    def tokens(self, lengths: NDArray[np.int64]) -> float:
        """Return the mean tokens that drafts of these lengths [n] bring, including one token for each sample."""
        right = 1.0 - self.wrong
        return float((np.sum(1 - right ** (1.0 + lengths))) / self.wrong)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second in the first steps and in the later steps."""

    first: float
    later: float


def fixed_rates(cell: Cell, length: int) -> Rates:
    """Return the rates with drafts of the same length in every step, limited by the step; 0 is plain decoding."""
    length = min(length, cell.device.most_rows // cell.samples - 1)
    tokens = cell.tokens(np.full(cell.samples, length))
    rows = cell.samples * (1 + length)
    return Rates(tokens / cell.seconds(rows), tokens / cell.seconds(rows, step=FIRST))


@dataclass(slots=True)
class SimulatedBatch:
    """A batch that a mode decides on, step by step."""

    cell: Cell
    mode: Any
    sweep: Sequence[MeasuredStep]
    late: int = 0
    """Steps by which measurements and outcomes lag behind the next decision."""
    seed: int = 0
    planner: KnobDrivenPlanner = field(init=False)
    lengths: list[float] = field(init=False, default_factory=list)
    """Mean draft length of each step."""
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        knobs = Knobs(mode=self.mode, draft_cap=WINDOW, margin=_MARGIN)
        self.planner = KnobDrivenPlanner(
            knobs, StepTimeEstimator(self.sweep), lambda _: None, graphs=self.cell.device.graphs
        )
        self._random = np.random.default_rng(self.cell.samples + self.cell.context + (self.seed << 32))

    def rates(self, steps: int = FIRST + LATER) -> Rates:
        """Decode `steps` steps, and return the rates of the first ones and of the later ones."""
        cell, table = self.cell, AcceptanceTable(_PRIORS)
        n = cell.samples
        states = [
            EngineSampleState(f"{i}", [0] * cell.context, [0], WINDOW, cell.context + 1) for i in range(n)
        ]
        ids = [state.sample_id for state in states]
        streak = np.full(n, 32)
        for _ in range(0 if n >= _ALONE else _SEEN):
            agreed = self._random.geometric(cell.wrong, 1) - 1
            streak[:1] = _compare(table, streak[:1], np.ones(1, np.int64), np.minimum(agreed, 1))
        made, took, due = [], [], list[tuple[StepShape, float, list[tuple[int, int]]]]()
        for step in range(steps):
            buckets = _RAMP[np.minimum(streak[:, None] + np.arange(WINDOW), 63)]
            proposals = {"reference": Proposals(_TOKENS[:n], table.probabilities[buckets])}
            drafts = self.planner.choose(states, proposals, self.cell.device.most_rows)
            lengths = np.array([len(drafts.tokens.get(each, ())) for each in ids])
            rows = n + int(lengths.sum())
            seconds = cell.seconds(rows, step)
            made.append(cell.tokens(lengths))
            took.append(seconds)
            self.lengths.append(int(lengths.sum()) / n)
            # Tokens that agree with the response before the next disagreement.
            agreed = np.minimum(self._random.geometric(cell.wrong, n) - 1, 1 << 20)
            accepted = np.minimum(agreed, lengths)
            # A reference is compared with the whole response, including the token after the draft.
            compared = accepted + 1
            kept = np.minimum(agreed, compared)
            streak = _compare(table, streak, compared, kept)
            shape = StepShape(n, rows, n * cell.context)
            measured = seconds * float(self._random.lognormal(0, NOISE))
            due.append((shape, measured, list(zip(lengths.tolist(), accepted.tolist(), strict=True))))
            if len(due) > self.late:
                self._report(*due.pop(0))
        first = sum(made[:FIRST]) / sum(took[:FIRST])
        # The first steps after a device has changed are not rated, like the steps of a cold start.
        begin = 2 * FIRST if cell.device.slowed is not None else FIRST
        return Rates(first, sum(made[begin:]) / sum(took[begin:]))

    def _report(self, shape: StepShape, seconds: float, outcomes: list[tuple[int, int]]) -> None:
        for drafted, accepted in outcomes:
            if drafted:
                self.planner.verified("reference", drafted, accepted)
        self.planner.stepped(shape, seconds)


def _compare(
    table: AcceptanceTable, streak: NDArray[np.int64], compared: NDArray[np.int64], kept: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Learn from `compared` [n] tokens of each reference, the first `kept` [n] of which agreed; return streaks."""
    tried_by, kept_by = np.zeros((2, len(_PRIORS)), np.int64)
    for position in range(int(compared.max())):
        reached = position < compared
        bucket = _RAMP[np.minimum(streak[reached] + position, 63)]
        tried_by += np.bincount(bucket, minlength=len(_PRIORS))
        kept_by += np.bincount(bucket[position < kept[reached]], minlength=len(_PRIORS))
    table.observe(slice(None), tried_by, kept_by)
    return np.where(kept < compared, 0, np.minimum(streak + compared, 63))
