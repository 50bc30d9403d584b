"""The steps of a run, in order, engine by engine: an engine is built once a slice, and that takes the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engine_cuda.kinds import FLOAT32, CudaSizes, EngineKind, EngineSetup
from kernels.tune.state import State

_ENGINE_STARTS, _DEVICE_STARTS = 90.0, 10.0
"""Seconds until a process has its engine, graphs captured, or the device alone."""
PREFILL = 10_000
"""Tokens a second that a prefill is estimated by."""
Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step: the process that does it, the order, and about how many seconds it takes.

    `arguments` are the order's; `more` adds those that come of earlier steps. LookupError: one of these failed.
    """

    name: str
    setup: EngineSetup
    order: str
    seconds: float
    arguments: Arguments = field(default_factory=dict)
    more: Callable[[State], Arguments] = field(default=lambda _: {})


def steps(model: Path, dtype: str, sizes: CudaSizes) -> list[CudaStep]:
    """Return the plan for a model: the device, exactness in float32, then each engine as it serves."""

    def setup(kind: EngineKind, numbers: str) -> EngineSetup:
        return EngineSetup(kind, model, numbers, max(sizes.rows), sizes.longest, sizes.kv_bytes)

    alone = setup(EngineKind.NONE, dtype)
    plan = [
        CudaStep(name, alone, name, seconds)
        for name, seconds in (("environment", 5), ("attention", 20), ("sampling", 30))
    ]
    ours = [kind for kind in sizes.kinds if kind is not EngineKind.STOCK]
    numbers = [dtype] if dtype == FLOAT32 else [FLOAT32, dtype]
    # The float32 engines first, which do nothing else.
    for number in numbers[:-1]:
        plan += [each for kind in ours for each in _tokens(setup(kind, number), sizes, ours[0])]
    for kind in sizes.kinds:
        own = setup(kind, numbers[-1])
        if kind is not EngineKind.STOCK:
            plan += _tokens(own, sizes, ours[0])
        if kind is not EngineKind.TREES:
            plan += _measured(own, sizes)
    return plan


def estimated(step: CudaStep, *, starts: bool) -> float:
    """Return the seconds that a step is estimated to take, with the start of its process if it `starts`."""
    if not starts:
        return step.seconds
    return step.seconds + (_DEVICE_STARTS if step.setup.kind is EngineKind.NONE else _ENGINE_STARTS)


def left(state: State, plan: Sequence[CudaStep]) -> float:
    """Return the estimated seconds of the steps that are left, corrected by how long the others took."""
    befores = [None, *(step.setup for step in plan)]
    seconds = {
        step.name: estimated(step, starts=step.setup != before)
        for step, before in zip(plan, befores, strict=False)
    }
    took = sum(state.done[name]["seconds"] for name in seconds if name in state.done)
    planned = sum(own for name, own in seconds.items() if name in state.done)
    rate = took / planned if planned else 1.0
    return rate * sum(own for name, own in seconds.items() if not state.over(name))


def tokens_name(kind: EngineKind, dtype: str, way: str) -> str:
    """Return the name of the step in which an engine generates tokens: plainly, with drafts or with trees."""
    return f"tokens: {kind}, {dtype}, {way}"


def _tokens(setup: EngineSetup, sizes: CudaSizes, first: EngineKind) -> Iterator[CudaStep]:
    """Yield the steps that generate the same samples plainly and with drafts, of which some are wrong.

    An engine for trees does so with trees, too.
    """
    truth = tokens_name(first, setup.dtype, "plain")
    common: Arguments = {"count": sizes.exact, "tokens": sizes.tokens, "wrong": max(sizes.wrong)}
    longest = max(sizes.drafts)
    ways = [("plain", 0), ("drafts", longest)]
    if setup.kind is EngineKind.TREES:
        ways.append(("trees", longest))
    for way, length in ways:
        arguments = {**common, "drafts": length, "trees": way == "trees"}

        def more(state: State, length: int = length) -> Arguments:
            return {"truth": state.done[truth]["result"]["tokens"] if length else None}

        yield CudaStep(tokens_name(setup.kind, setup.dtype, way), setup, "tokens", 15, arguments, more)


def _measured(setup: EngineSetup, sizes: CudaSizes) -> Iterator[CudaStep]:
    """Yield the steps that measure one engine."""
    kind = setup.kind
    for context in sizes.contexts:
        for rows in sizes.rows:
            drafts = [
                (length, wrong)
                for length in sizes.drafts
                for wrong in sizes.wrong
                if rows in sizes.drafted_rows
                and context == sizes.contexts[0]
                and kind is not EngineKind.STOCK
            ]
            arguments = {"rows": rows, "context": context, "steps": sizes.steps, "drafts": drafts}
            seconds = 3 + rows * context / PREFILL * (1 + 0.2 * len(drafts)) + 2 * len(drafts)
            yield CudaStep(f"steps: {kind}, {rows} x {context}", setup, "cell", seconds, arguments)
    rows, context = sizes.drafted_rows[-1], sizes.contexts[0]
    where: Arguments = {"rows": rows, "context": context}
    lengths = (0,) if kind is EngineKind.STOCK else (0, max(sizes.drafts) // 2)
    for length in lengths:
        yield CudaStep(f"waits: {kind}, {length} drafts", setup, "waits", 20, {**where, "length": length})
    if kind is not EngineKind.STOCK:
        longest = max(sizes.drafts)
        yield CudaStep(f"deciding: {kind}", setup, "deciding", 15, {**where, "length": longest})
        yield CudaStep(f"memory: {kind}", setup, "memory", 1)
