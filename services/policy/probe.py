"""Measures a live engine: matrix products, copies, and a sweep of steps.

Drafts of a sweep are tokens at random: a step takes as long whether they are kept or not, and as hardly one is,
contexts stay the size that they are meant to be. They grow by a token a step all the same, so draft lengths take
turns: each is measured at about the same contexts as the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Protocol

from services.generation.engine.types import SampleRequest, SampleState, SampleStep
from services.platform.sampling import ModelLimits, Sampling
from services.policy.sweep import Point, Sweep

_MATRIX = 1024
_COPY_BYTES = 64 << 20
_BENCHMARK_REPEATS = 25
# Turns of each draft length, as time allows: with more, samples outgrow their length.
_LEAST_TURNS, _MOST_TURNS = 2, 4
# Steps of a turn, and those before them: the first of a shape may allocate.
_STEPS, _UNTIMED_STEPS = 3, 1
# Most tokens of prompts in a cell, unless the grid says less: reading them takes time that nobody asked for.
_MOST_TOKENS = 1 << 16
# One cell in so many is kept from the fit.
_HELD_OUT = 4


class SteppedEngine(Protocol):
    """What a sweep uses of `services.generation.engine.core.Engine`."""

    limits: ModelLimits

    def add(self, request: SampleRequest) -> None: ...
    def abort(self, sample_ids: Iterable[str]) -> None: ...
    def step(self) -> list[SampleStep]: ...
    def decoding(self) -> list[SampleState]: ...
    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None: ...
    @property
    def has_work(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of a sweep: batch sizes, prompt lengths and draft lengths; `seconds` for all of it, prefill apart.

    A cell has at most `max_rows` rows, samples and draft tokens together: large batches have shorter drafts. Its
    samples have at most `max_tokens` tokens together: large batches have shorter prompts.
    Every cell is measured in `passes` at different times, and the quickest counts: whatever else the machine does
    only ever makes a step longer.
    """

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)
    lengths: Sequence[int] = (16, 128, 384, 2048, 8192)
    drafts: Sequence[int] = (0, 1, 2, 4, 8, 16)
    seconds: float = 45.0
    passes: int = 2
    max_rows: int = 1 << 30
    max_tokens: int = 1 << 60

    def within(self, max_batch: int, max_length: int, max_rows: int, max_tokens: int) -> Grid:
        """The part of it that an engine can run. ValueError when there is too little of it."""
        batches = [each for each in self.batches if each <= min(max_batch, max_rows)]
        lengths = [each for each in self.lengths if each + self._margin <= max_length]
        found = replace(self, batches=batches, lengths=lengths, max_rows=max_rows, max_tokens=max_tokens)
        if len(found.places) < 2:
            raise ValueError("the engine's limits leave fewer than two cells to measure")
        return found

    @property
    def places(self) -> list[tuple[int, int]]:
        """The batches and prompt lengths that are measured together, by their numbers."""
        return [
            (i, j)
            for i, batch in enumerate(self.batches)
            for j, length in enumerate(self.lengths)
            if batch * (length + self._margin) <= self.max_tokens and batch * length <= _MOST_TOKENS
        ]

    def drafts_of(self, batch: int) -> list[int]:
        """The draft lengths that a batch is measured with; the longest there is room for stands for longer ones."""
        most = self.max_rows // batch - 1
        return sorted({min(each, most) for each in self.drafts})

    @property
    def _margin(self) -> int:
        """Tokens beyond the prompt that the samples of a cell may need, many more than they will."""
        steps = _MOST_TURNS * (_UNTIMED_STEPS + _STEPS) * len(self.drafts)
        return 2 * steps + max(self.drafts)


class EngineStalled(RuntimeError):
    """The engine ended or preempted samples of the sweep: it has no memory for a cell."""


def measure_throughput(dtype: str) -> float:
    """Operations a second of large matrix products, with torch's threads as they are."""
    import torch

    left, right = (torch.randn(_MATRIX, _MATRIX).to(getattr(torch, dtype)) for _ in range(2))
    left, right = left.to(_device()), right.to(_device())
    return 2 * _MATRIX**3 / _best_seconds(lambda: left @ right)


def measure_bandwidth() -> float:
    """Bytes a second of large copies, read and written."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_seconds(lambda: target.copy_(source))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _best_seconds(run: Callable[[], object]) -> float:
    """The quickest of some runs: others are disturbed ones."""
    import torch

    def timed() -> float:
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return min(timed() for _ in range(_BENCHMARK_REPEATS))


def sweep(
    engine: SteppedEngine,
    grid: Grid,
    progress: Callable[[int, int], None] = lambda done, of: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sweep:
    """Measure every cell of a grid. `progress` is told how many batches are done, of how many.

    Raises:
        EngineStalled: a cell does not fit into the engine.
    """
    random = Random(0)
    places, turns = grid.places, []
    for _ in range(grid.passes):
        # In no order, so that a machine that becomes slower meanwhile does not look like a long context.
        random.shuffle(places)
        turns += places
    slot = grid.seconds / len(turns)
    found: dict[tuple[int, int, int, int], Point] = {}
    for done, (i, j) in enumerate(turns):
        batch = grid.batches[i]
        cells = _batch(engine, batch, grid.lengths[j], grid.drafts_of(batch), slot, random, clock)
        for (turn, k), cell in cells.items():
            # All turns of a cell, or none: they are much the same.
            held_out = (i + 2 * j + k) % _HELD_OUT == _HELD_OUT - 1
            before = found.get((i, j, k, turn))
            if before is None or cell.seconds < before.seconds:
                found[i, j, k, turn] = cell.model_copy(update={"held_out": held_out})
        progress(done + 1, len(turns))
    return Sweep(tuple(found[key] for key in sorted(found)))


def _batch(
    engine: SteppedEngine,
    batch: int,
    length: int,
    drafts: Sequence[int],
    slot: float,
    random: Random,
    clock: Callable[[], float],
) -> dict[tuple[int, int], Point]:
    """The cells of one batch and context length, by turn and number of the draft length."""
    vocab = engine.limits.vocab_size
    names = [f"sweep-{batch}-{length}-{i}" for i in range(batch)]
    sampling = Sampling(ignore_eos=True)
    for name in names:
        prompt = tuple(random.randrange(vocab) for _ in range(length))
        engine.add(SampleRequest(name, prompt, (), sampling, random.getrandbits(32)))
    while len(engine.decoding()) < batch:
        if any(step.finish is not None for step in engine.step()):
            raise EngineStalled(f"{batch} samples of {length} tokens do not stay in the engine")
    points: dict[tuple[int, int], Point] = {}
    began = clock()
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and clock() - began >= slot:
            break
        # To and fro, so that contexts grow for all draft lengths alike.
        for k in range(len(drafts)) if turn % 2 == 0 else reversed(range(len(drafts))):
            points[turn, k] = _cell(engine, batch, length, drafts[k], random, clock)
    engine.abort(names)
    while engine.has_work:
        # The worker has yet to be told.
        engine.step()
    return points


def _cell(
    engine: SteppedEngine, batch: int, length: int, width: int, random: Random, clock: Callable[[], float]
) -> Point:
    taken: list[float] = []
    contexts: list[int] = []
    vocab = engine.limits.vocab_size
    for step in range(_UNTIMED_STEPS + _STEPS):
        states = engine.decoding()
        if len(states) < batch:
            raise EngineStalled(f"{batch} samples of {length} tokens do not stay in the engine")
        if min(state.room for state in states) < width:
            raise EngineStalled(f"samples of {length} tokens have no room left for drafts of {width}")
        if width:
            drafts = {each.sample_id: [random.randrange(vocab) for _ in range(width)] for each in states}
            engine.put_drafts(drafts)
        context = sum(len(state.prompt) + len(state.response) for state in states)
        began = clock()
        engine.step()
        took = clock() - began
        if step >= _UNTIMED_STEPS:
            taken.append(took)
            contexts.append(context)
    rows = batch * (1 + width)
    return Point(requests=batch, rows=rows, context=round(median(contexts)), seconds=median(taken))
