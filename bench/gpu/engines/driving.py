"""Samples through an engine of this process, ours or stock, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from bench.gpu.engines.stock import StockVllm
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest

_WARM_UP = 2
_serials = count(1)
Truth = Mapping[int, Sequence[int]]
"""Tokens of each sample, by its number."""


@dataclass(frozen=True, slots=True)
class DraftGiving:
    """Drafts that samples are given: `length` tokens, out of `truth`, of which a share is `wrong`."""

    length: int = 0
    wrong: float = 0.0
    truth: Truth = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrivenBatch:
    """Samples with random prompts of `context` tokens that decode `tokens` tokens each."""

    rows: int
    context: int
    tokens: int


@dataclass(slots=True)
class Driven:
    """Steps in which all samples decoded: seconds of each, their tokens, and the host's part for drafts."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    drafting: list[float] = field(default_factory=list)
    responses: dict[int, list[int]] = field(default_factory=dict)


class BatchDriver:
    """One batch in an engine. Ids are new in every run: vLLM must never meet the same one twice."""

    def __init__(self, engine: Any, batch: DrivenBatch, drafts: DraftGiving) -> None:
        self._engine, self._batch, self._drafts = engine, batch, drafts
        self._stock = isinstance(engine, StockVllm)
        self._names = [f"{next(_serials)}-{i}" for i in range(batch.rows)]
        self._places = {name: i for i, name in enumerate(self._names)}
        self._found = Driven(responses={i: [] for i in range(batch.rows)})
        self._random = Random(1)
        self._before: Callable[[], object] = self._put if drafts.length else _nothing
        self._vocab = engine.vocab_size if self._stock else engine.limits.vocab_size

    def enter(self) -> None:
        """Queue the samples, and step until all of them decode and the first steps are over."""
        random = Random(self._batch.context)
        for i, name in enumerate(self._names):
            prompt = [random.randrange(3, self._vocab) for _ in range(self._batch.context)]
            if self._stock:
                self._engine.add(name, prompt, self._batch.tokens)
                continue
            sampling = Sampling(max_tokens=self._batch.tokens, ignore_eos=True)
            self._engine.add(EngineRequest(name, tuple(prompt), (), sampling, 1000 + i))
        while not all(self._found.responses.values()):
            if not self._engine.has_work:
                raise RuntimeError(f"samples of {self._batch} ended before all had begun")
            self._step()
        for _ in range(_WARM_UP):
            self._step()

    def run(self, steps: int) -> Driven:
        """Run steps that are timed, as long as every sample gets tokens in each of them."""
        return self.run_with(self._put if self._drafts.length else _nothing, steps)

    def run_with(self, put: Callable[[], object], steps: int) -> Driven:
        """Run steps as above, before each of which `put` hands over its drafts."""
        self._before = put
        for _ in range(steps):
            began = time.perf_counter()
            before = sum(map(len, self._found.responses.values()))
            drafting, stepped = self._step()
            if stepped < self._batch.rows:
                break
            self._found.seconds.append(time.perf_counter() - began)
            self._found.drafting.append(drafting)
            self._found.tokens += sum(map(len, self._found.responses.values())) - before
        return self._found

    def leave(self) -> None:
        """End the samples, and let the worker know."""
        self._engine.abort(self._names)
        while self._engine.has_work:
            self._engine.step()

    def _step(self) -> tuple[float, int]:
        """Run a step; returns the seconds that the drafts took, and the number of samples with tokens."""
        began = time.perf_counter()
        self._before()
        drafting = time.perf_counter() - began
        stepped = self._engine.step()
        for step in stepped:
            self._found.responses[self._places[step.sample_id]] += step.token_ids
        return drafting, len(stepped)

    def _put(self) -> None:
        self._engine.put_drafts(self._given())

    def _given(self) -> dict[str, list[int]]:
        """Return the drafts of a step; they reach over the tokens that are in flight."""
        requests, found = self._engine._scheduler.requests, {}
        for state in self._engine.decoding():
            ahead = requests[state.sample_id].num_output_placeholders
            here = len(state.response)
            truth = self._drafts.truth[self._places[state.sample_id]]
            # Room is for tokens behind those that are known.
            reach = min(ahead + self._drafts.length, state.room)
            tokens = [
                token if self._random.random() >= self._drafts.wrong else (token + 1) % self._vocab
                for token in truth[here : here + reach]
            ]
            if tokens:
                found[state.sample_id] = tokens
        return found


def _nothing() -> None:
    """Hand over no drafts."""
