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


@dataclass(slots=True)
class _Timer:
    """Clock, and the seconds that are left to measure."""

    clock: Callable[[], float]
    left: float


def measure_steps(
    engine: Engine, seconds: float = SWEEP_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> list[MeasuredStep]:
    """Return measured steps of an idle engine, the most telling ones if there is no time for all.

    Args:
        engine: without samples; afterwards it has none, and no KV.
        seconds: time of the steps, without prefill.
        clock: in seconds.

    Raises:
        Exception: of the engine, which has no sample of the sweep then either.
    """
    timer, random, found = _Timer(clock, seconds), Random(0), list[MeasuredStep]()
    capacity = engine.kv_capacity
    most, longest = engine.row_capacity, engine.limits.max_model_len
    batches = swept_batches(engine.max_running, most, longest, engine.graph_sizes)
    for batch in batches:
        if batch.samples * 2 * batch.prompt <= capacity and timer.left > 0:
            found += _measure(engine, batch, timer, random)
    engine.forget_kv()
    return found


def _measure(engine: Engine, batch: SweptBatch, timer: _Timer, random: Random) -> list[MeasuredStep]:
    found = list[MeasuredStep]()
    names = [f"sweep-{batch.samples}-{batch.prompt}-{i}" for i in range(batch.samples)]
    try:
        _admit(engine, names, min(batch.prompt, engine.limits.max_model_len - 1), random)
        for rows in batch.rows:
            taken = [_step(engine, rows, timer, random) for _ in range(_UNTIMED_STEPS + _STEPS)]
            full = [
                each for each in taken[_UNTIMED_STEPS:] if each is not None and each.samples == batch.samples
            ]
            if full:
                found.append(min(full, key=lambda each: each.seconds))
            if timer.left <= 0:
                break
    finally:
        engine.abort(names)
    while engine.has_work:
        # A last step tells the worker.
        engine.step()
    return found


def _admit(engine: Engine, names: list[str], length: int, random: Random) -> None:
    """Let samples with random prompts of `length` tokens decode, or end."""
    vocab = engine.limits.vocab_size
    for name in names:
        prompt = tuple(random.randrange(vocab) for _ in range(length))
        engine.add(EngineRequest(name, prompt, (), Sampling(ignore_eos=True), random.getrandbits(32)))
    while engine.has_work and len(engine.decoding()) < len(names):
        if any(step.finish is not None for step in engine.step()):
            break


def _step(engine: Engine, rows: int, timer: _Timer, random: Random) -> MeasuredStep | None:
    """Run a step that verifies so many tokens; None where there is no room for them, or nothing to decode."""
    states, vocab = engine.decoding(), engine.limits.vocab_size
    if not 0 < len(states) <= rows:
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
