"""Measure the step times of an engine before it serves: the prior of its step-time estimator.

The steps verify random draft tokens: a step takes as long whether they are accepted or not, and as hardly one is,
contexts stay short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest
from services.step_time.prior import MeasuredStep
from services.step_time.sweep import SWEEP_SECONDS, SweptBatch, swept_batches

if TYPE_CHECKING:
    from services.generation.engine.core import Engine

# Steps of a shape: the first of it may allocate memory or compile, and the quickest of the others counts, because
# whatever else a machine does only prolongs a step.
_UNTIMED_STEPS, _STEPS = 1, 2
_LONGEST = 4
"""Times the seconds of the measured steps: the most that a sweep takes with prefill. An instance waits for it."""


@dataclass(slots=True)
class _Timer:
    """Clock, the seconds that are left to measure, and when the sweep ends in any case."""

    clock: Callable[[], float]
    left: float
    until: float

    @property
    def over(self) -> bool:
        """True if no other shape is to be begun."""
        return self.left <= 0 or self.late

    @property
    def late(self) -> bool:
        """True if nothing more is to be begun."""
        return self.clock() >= self.until


def measure_steps(
    engine: Engine, seconds: float = SWEEP_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> list[MeasuredStep]:
    """Return measured steps of an idle engine, the most telling ones if there is no time for all.

    Args:
        engine: without samples; afterwards it has none, and no KV.
        seconds: time of the measured steps. With prefill and what else the engine does the sweep takes four times
            as long at most, and one step more.
        clock: in seconds.

    Raises:
        Exception: of the engine, which has no sample of the sweep then either.
    """
    timer = _Timer(clock, seconds, clock() + _LONGEST * seconds)
    random, found = Random(0), list[MeasuredStep]()
    capacity = engine.kv_capacity
    most, longest = engine.row_capacity, engine.limits.max_model_len
    batches = swept_batches(engine.max_running, most, longest, engine.graph_sizes)
    for batch in batches:
        if batch.samples * 2 * batch.prompt <= capacity and not timer.over:
            found += _measure(engine, batch, timer, random)
    engine.forget_kv()
    return found


def _measure(engine: Engine, batch: SweptBatch, timer: _Timer, random: Random) -> list[MeasuredStep]:
    found = list[MeasuredStep]()
    names = [f"sweep-{batch.samples}-{batch.prompt}-{i}" for i in range(batch.samples)]
    try:
        _admit(engine, names, min(batch.prompt, engine.limits.max_model_len - 1), timer, random)
        for rows in batch.rows:
            taken = [_step(engine, rows, timer, random) for _ in range(_UNTIMED_STEPS + _STEPS)]
            full = [
                each for each in taken[_UNTIMED_STEPS:] if each is not None and each.samples == batch.samples
            ]
            if full:
                found.append(min(full, key=lambda each: each.seconds))
            if timer.over:
                break
    finally:
        engine.abort(names)
    while engine.has_work:
        # A last step tells the worker.
        engine.step()
    return found


def _admit(engine: Engine, names: list[str], length: int, timer: _Timer, random: Random) -> None:
    """Let samples with random prompts of `length` tokens decode, or end; stop where the time is over."""
    vocab = engine.limits.vocab_size
    for name in names:
        prompt = tuple(random.randrange(vocab) for _ in range(length))
        engine.add(EngineRequest(name, prompt, (), Sampling(ignore_eos=True), random.getrandbits(32)))
    while engine.has_work and len(engine.decoding()) < len(names) and not timer.late:
        if any(step.finish is not None for step in engine.step()):
            break


def _step(engine: Engine, rows: int, timer: _Timer, random: Random) -> MeasuredStep | None:
    """Run a step that verifies so many tokens; None where there is no room for them, or nothing to decode."""
    states, vocab = engine.decoding(), engine.limits.vocab_size
    if not 0 < len(states) <= rows or timer.late:
        return None
    width, longer = divmod(rows - len(states), len(states))
    if min(state.room for state in states) < width + (longer > 0):
        return None
    drafts = {
        each.sample_id: [random.randrange(vocab) for _ in range(width + (i < longer))]
        for i, each in enumerate(states)
        if width or i < longer
    }
    engine.put_drafts(drafts)
    context = sum(len(state.prompt) + len(state.response) for state in states)
    began = timer.clock()
    engine.step()
    engine.settle()
    seconds = timer.clock() - began
    timer.left -= seconds
    return MeasuredStep(samples=len(states), rows=rows, context=context, seconds=max(seconds, 1e-9))
