"""Simulate decisions on devices with known step times: decisions cost nothing, and figures are reproducible.

A cell is a known device (services/simulator/device_tables.py), a batch of 1 to 512 samples with contexts of 1k to
64k tokens whose KV fits, and drafts of which 2, 15, 40 or 95 % of the tokens are wrong. In each cell the modes of
an instance begin with a sweep of the device and nothing else. They are compared with plain decoding and with every
fixed draft length, over the first 32 steps and over the later ones. A cell reports whether its
device's times are measured or from a data sheet. Writes runs/bench/policy.simulated.json.

The modes decide with their real code, on the estimator's own prior: a sweep of the simulated device. Every token of
a draft is wrong with the same probability. Acceptance is learned as the reference drafter learns it; a small batch
is the tail of a larger one that it has learned from. Samples do not end and their context does not grow, so that a
cell is a single question. Drafting and planning take no time here.

A way of decoding is rated by the tokens that its drafts bring on average, not by the tokens that happened to be
accepted.

    python -m bench.policy.simulated [--devices H100,B200] [--modes planner,toggle] [--seed 0] [--late 2]
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.report import format_value, numbers, option_parser, show_rows, write
from services.contracts.knobs import Knobs
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.acceptance import AcceptanceTable
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.plan import StepShape
from services.generation.speculation.planner import KnobDrivenPlanner
from services.simulator.device_tables import NOISE, DeviceTable, known_devices, swept
from services.step_time.estimator import StepTimeEstimator, warm_up
from services.step_time.sweep import MeasuredStep

SAMPLES = (1, 4, 16, 64, 128, 256, 512)
CONTEXTS = (1024, 4096, 16384, 65536)
WRONG = (0.02, 0.15, 0.4, 0.95)
GOALS = {
    "planner_vs_best_fixed_min": 0.97,
    "planner_first_32_min": 0.9,
    "worst_vs_plain_first_32": 0.95,
    "worst_vs_plain": 0.98,
}
# The CPU's model has short contexts.
_LONGEST_ON_CPU = 4096
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


def main() -> None:
    """Simulate the cells, then show and write the figures."""
    arguments = _arguments()
    warm_up()
    rows = [
        row
        for device in known_devices()
        if not arguments.devices or any(name in device.name for name in arguments.devices)
        for row in cells(device, arguments.modes, seed=arguments.seed, late=arguments.late)
    ]
    figures = figures_of(rows)
    tables = sorted({row["device"] for row in rows})
    columns = ("device", "cells", *GOALS)
    by_device = [(name, [row for row in rows if row["device"] == name]) for name in tables]
    modes = len(arguments.modes)
    worst = [
        [name, str(len(some) // modes), *(format_value(figures_of(some).get(goal)) for goal in GOALS)]
        for name, some in by_device
    ]
    shown = show_rows("policy, simulated: the worst cell of each device", columns, worst)
    goals = [
        (name, format_value(value), f">= {GOALS[name]}" if name in GOALS else "")
        for name, value in figures.items()
    ]
    show_rows("policy, simulated", ("figure", "value", "goal"), goals)
    write("policy.simulated", {**figures, "cells": rows, "steps": [FIRST, LATER], "tables": {"worst": shown}})


def cells(
    device: DeviceTable, modes: Sequence[str], samples: Sequence[int] = SAMPLES, seed: int = 0, late: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the figures of the cells of a device, for each mode."""
    sweep = swept(device, max(SAMPLES), seed)
    for n in samples:
        for context in CONTEXTS:
            if n * context > device.kv_tokens or (not device.graphs and context > _LONGEST_ON_CPU):
                continue
            for wrong in WRONG:
                cell = Cell(device, n, context, wrong)
                fixed = {length: fixed_rates(cell, length) for length in (0, *FIXED)}
                best = max(fixed, key=lambda length: fixed[length].later)
                for mode in modes:
                    rates = SimulatedBatch(cell, mode, sweep, late, seed).rates()
                    yield {
                        "device": device.name,
                        "source": device.source,
                        "samples": n,
                        "context": context,
                        "wrong": wrong,
                        "mode": mode,
                        "best_fixed": best,
                        "best_vs_plain": fixed[best].later / fixed[0].later,
                        "first_vs_best": rates.first / max(each.first for each in fixed.values()),
                        "later_vs_best": rates.later / fixed[best].later,
                        "first_vs_plain": rates.first / fixed[0].first,
                        "later_vs_plain": rates.later / fixed[0].later,
                    }


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the planner's figures with goals, and the worst and the median cell of every other mode."""
    planned = [row for row in rows if row["mode"] == "planner"]
    figures = {}
    if planned:
        figures = {
            "planner_vs_best_fixed_min": min(row["later_vs_best"] for row in planned),
            "planner_first_32_min": min(row["first_vs_best"] for row in planned),
            "worst_vs_plain_first_32": min(row["first_vs_plain"] for row in planned),
            "worst_vs_plain": min(row["later_vs_plain"] for row in planned),
        }
    for mode in sorted({row["mode"] for row in rows} - {"planner"}):
        some = [row for row in rows if row["mode"] == mode]
        figures[f"{mode}_worst_vs_plain"] = min(row["later_vs_plain"] for row in some)
        figures[f"{mode}_vs_best_fixed_median"] = median(row["later_vs_best"] for row in some)
    return figures


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--devices", type=numbers(str), default=[], help="parts of their names; all by default"
    )
    parser.add_argument("--modes", type=numbers(str), default=["planner", "toggle", "solver", "adaptive"])
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise and of the accepted tokens")
    parser.add_argument(
        "--late",
        type=int,
        default=0,
        help="decisions made before the outcomes and the time of a step are known",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
