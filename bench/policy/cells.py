"""Measure the cells of one model: its engine runs through all of them, and modes take turns on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from bench.policy.figures import (
    ADAPTIVE,
    FIXED,
    PLAIN,
    PLANNER,
    SOLVER,
    TOGGLE,
    MeasuredCell,
    promising,
    rotated,
)
from bench.policy.rounds import (
    WINDOW,
    MeasuredRound,
    RoundOrigin,
    StepErrors,
    fixed,
    make_kernels,
    planner_of,
    requests_of,
    run_round,
    steered,
    with_drafts,
)
from bench.report import BenchProgress, cores
from services.generation.engine.types import EngineOptions, EngineSampleState
from services.generation.speculation.drafter import Proposals
from services.generation.speculation.plan import StepShape
from services.generation.speculation.speculation import Speculation
from services.platform.memory import keep_freed_memory
from services.step_time.estimator import StepTimeEstimator
from services.step_time.sweep import MeasuredStep

if TYPE_CHECKING:
    from services.generation.engine.core import Engine

MOST = 128
"""Samples of the largest batch."""
_LENGTHS = (1, 2, 4, 8, 12, 16)
# Draft lengths of the toggle.
_TOGGLED = (8,)
# Processor seconds of a plain round, within these limits of tokens a sample.
_ROUND_SECONDS, _TOKENS = 0.18, (40, 80)
# Rounds that sift the fixed lengths. Each round keeps the lengths that are not far slower than the best. In the end
# the best stays, and the second if it is about as fast.
_SIFTED, _FAR, _CONTENDERS, _CLOSE = 3, 1.5, 2, 1.15
# Steps after which a mode should know its machine.
_LEARNING_STEPS = 32
_TIMED = 256


@dataclass(frozen=True, slots=True)
class GivenCells:
    """A model and the cells to measure on it; a cell is a batch size and a share of wrong draft tokens."""

    name: str
    folder: Path
    samples: Sequence[int]
    wrong: Sequence[float]
    rounds: int


@dataclass(slots=True)
class MeasuredModel:
    """All cells of a model, the sweep of its engine, and the time of a decision."""

    cells: list[MeasuredCell]
    sweep: list[MeasuredStep]
    decision_us: float
    progress: BenchProgress


def measure_model(given: GivenCells, progress: BenchProgress) -> MeasuredModel:
    """Start an engine in this process, which can have only one, and measure the cells on it."""
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cores()[-1])}
    # As instances do.
    keep_freed_memory()
    with _engine(given.folder) as engine:
        from services.generation.engine.startup import measure_steps

        sweep = measure_steps(engine, clock=time.process_time)
        decision, cells = decision_microseconds(sweep), list[MeasuredCell]()
        # Alternate between batch sizes, so that the finished cells predict the time of the others.
        for wrong in given.wrong:
            for samples in given.samples:
                cells.append(_Turns(engine, sweep, given.name, samples, wrong).measure(given.rounds))
                progress.advance(f"{given.name}, {samples} samples, {wrong:.0%} wrong")
    return MeasuredModel(cells, sweep, decision, progress)


@contextmanager
def _engine(folder: Path) -> Iterator[Engine]:
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import warm_up

    engine = Engine(
        EngineOptions(
            str(folder),
            dtype="float32",
            max_num_seqs=MOST,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 30,
            # A round must not reuse the prompts of the previous one.
            enable_prefix_caching=False,
        )
    )
    try:
        warm_up(engine)
        make_kernels(engine, MOST)
        yield engine
    finally:
        engine.shutdown()


class _Turns:
    """One cell: modes decode the same batch in turns, and must give the same tokens."""

    def __init__(
        self, engine: Engine, sweep: Sequence[MeasuredStep], model: str, samples: int, wrong: float
    ) -> None:
        self._engine, self._model, self._samples, self._wrong = engine, model, samples, wrong
        vocab = self._vocab = engine.limits.vocab_size
        tokens = round_tokens(StepTimeEstimator(sweep).seconds(samples, samples, samples * _TOKENS[0]))
        requests = requests_of(samples, tokens, vocab)
        self._requests, self._truth = requests, run_round(engine, requests, None).responses
        self._origin, self._errors = RoundOrigin(), StepErrors()
        steer = partial(steered, sweep, vocab=vocab, origin_of=self._origin)
        self._learners = {
            **{f"{TOGGLE} {cap}": steer("toggle", cap) for cap in _TOGGLED},
            ADAPTIVE: steer("adaptive", WINDOW),
            SOLVER: steer("solver", WINDOW),
            PLANNER: steer("planner", WINDOW, metrics=self._errors),
        }

    def measure(self, rounds: int) -> MeasuredCell:
        """Sift the fixed lengths, let the other modes learn, then run the rounds."""
        fixed_modes: dict[str, Speculation | None] = {
            f"{FIXED} {length}": fixed(length, self._vocab) for length in self._contenders()
        }
        cold = {mode: self._learn(mode) for mode in self._learners}
        # Count errors in the rounds only.
        self._errors.errors.clear()
        modes = {PLAIN: None, **fixed_modes, **self._learners}
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        for turn in range(rounds):
            for mode in rotated(list(modes), turn):
                seconds[mode].append(self._round(modes[mode], turn).seconds)
        tokens, errors = sum(map(len, self._truth.values())), self._errors.errors
        return MeasuredCell(self._model, self._samples, self._wrong, tokens, seconds, cold, errors)

    def _contenders(self) -> list[int]:
        """Return the fixed lengths that may be the best."""
        seconds: dict[int, list[float]] = {length: [] for length in _LENGTHS}
        left = list(_LENGTHS)
        for turn in range(_SIFTED):
            for length in left:
                seconds[length].append(self._round(fixed(length, self._vocab), -1 - turn).seconds)
            left = promising({length: seconds[length] for length in left}, len(_LENGTHS), _FAR)
        return promising({length: seconds[length] for length in left}, _CONTENDERS, _CLOSE)

    def _learn(self, mode: str) -> float:
        """Let a mode decode until it should know the machine; return the seconds of its first round."""
        first = self._round(self._learners[mode], -1)
        steps, turn = first.steps, -1
        while steps < _LEARNING_STEPS:
            turn -= 1
            steps += self._round(self._learners[mode], turn).steps
        return first.seconds

    def _round(self, speculation: Speculation | None, turn: int) -> MeasuredRound:
        """Decode the batch with the drafts of this turn; turns before the first counted one are negative."""
        self._origin.step += 1
        requests = with_drafts(self._requests, self._truth, self._wrong, self._vocab, turn)
        found = run_round(self._engine, requests, speculation)
        if found.responses != self._truth:
            raise RuntimeError("a mode changed tokens")
        return found


def round_tokens(plain: float) -> int:
    """Return the tokens of a round's longest response for plain steps of `plain` seconds; a multiple of 8."""
    least, most = _TOKENS
    return min(max(round(_ROUND_SECONDS / plain / 8) * 8, least), most)


def decision_microseconds(sweep: Sequence[MeasuredStep], repeats: int = 200) -> float:
    """Return the median time of a decision for 256 samples, 2 drafters and 16 tokens."""
    random = np.random.default_rng(0)
    samples = [EngineSampleState(f"s{i}", [1] * 100, [1] * 200, 100, 300) for i in range(_TIMED)]

    def made() -> Proposals:
        shape = (_TIMED, WINDOW)
        return Proposals(np.ones(shape, np.int32), random.uniform(0.5, 1, shape))

    proposals = {"reference": made(), "suffix": made()}
    plan = planner_of(sweep, "planner", WINDOW, RoundOrigin())
    taken = []
    for i in range(repeats):
        # As in an instance, every step is measured, so the estimator is solved again.
        plan.stepped(StepShape(_TIMED, _TIMED * (1 + i % WINDOW), 300 * _TIMED), 0.02 + 1e-5 * (i % 7))
        began = time.perf_counter()
        plan.choose(samples, proposals)
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e6
