"""An engine that follows a script, for tests of what steps it: no model, no time of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import Violation
from services.contracts.errors import DataLoss, InvalidArgument, ServiceError
from services.contracts.sampling import ModelLimits, Sampling
from services.generation.engine.model_support import ModelSupport
from services.generation.engine.types import (
    Ending,
    EngineLoad,
    EngineRequest,
    EngineSampleState,
    Finish,
    SampleStep,
)
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import SampleTable

# The cached token that no script takes over.
REFUSED = 511
RUNNER_UP, FAR = 300, 9.0


@dataclass(slots=True)
class Clock:
    """Time that passes when it is told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class ScriptedEngine:
    """Steps as often as it has permits; the token at response position p is p, its logprob -p.

    Of a cached rollout every token is taken over until one that is `REFUSED`; p_now of a token is -token.

    Samples beyond `seats` wait. A step takes `step_time` of the clock. `errors` maps a sample's prompt to the
    position where its logits are NaN; `fault` is raised by the coming step, `refusal` by the coming `add`.
    """

    clock: Clock = field(default_factory=Clock)
    seats: int = 64
    step_time: float = 10.0
    permits: int = 0
    errors: dict[tuple[int, ...], int] = field(default_factory=dict)
    contexts: dict[tuple[int, ...], list[int | None]] = field(default_factory=dict)
    """By prompt, for each step: tokens found in the prefix cache, None where the sample was running already."""
    fault: BaseException | None = None
    refusal: Exception | None = None
    load_fault: Exception | None = None
    apply_fault: Exception | None = None
    limits: ModelLimits = field(default_factory=lambda: ModelLimits(512, 64))
    device: str = "script"
    attention: str = "script"
    ties_head: bool = False
    failed_kernels: list[str] = field(default_factory=list)
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    responses: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    applied: list[dict[str, Any]] = field(default_factory=list)
    kept: list[set[str]] = field(default_factory=list)
    """Samples that kept their KV, by update."""
    threads: set[int] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    asleep: bool = False
    row_capacity: int = 1 << 20
    graph_sizes: Sequence[int] = ()
    prompt_rows: int = 0
    dtype: str = "float32"
    model_drafts: dict[str, Any] = field(default_factory=dict)
    support: ModelSupport = field(default_factory=ModelSupport)
    form: Any = None
    ties: dict[int, float] = field(default_factory=dict)
    """Margins by response position, `FAR` elsewhere; the runner-up of a token is `RUNNER_UP` more."""
    # Of an engine that schedules ahead: what the step in flight will have done.
    ahead: bool = False
    flying: list[SampleStep] | None = None

    def allow(self, steps: int) -> None:
        """Let the engine step so often."""
        self.permits += steps

    def add(self, request: EngineRequest) -> None:
        self.wake()
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        assert request.sample_id not in self.requests, "an id was used twice"
        self.requests[request.sample_id] = request
        self.responses[request.sample_id] = list(request.prefix)

    def why_unsampled(self, request: EngineRequest, response: Sequence[int]) -> ServiceError:
        where = f"nothing at response position {len(response)}"
        if request.sampling.json_schema:
            return InvalidArgument([Violation("sampling.json_schema", where)])
        return DataLoss(where)

    def finished_by_prefix(self, request: EngineRequest) -> Ending | None:
        full = len(request.prefix) >= (request.sampling.max_tokens or 1 << 30)
        return Ending(Finish.LENGTH) if full else None

    def abort(self, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids:
            self.aborted.append(sample_id)
            self._forget(sample_id)

    def step(self) -> list[SampleStep]:
        self.threads.add(threading.get_ident())
        self.permits -= 1
        self.clock.now += self.step_time
        if self.fault is not None:
            raise self.fault
        done = [self._step(sample_id) for sample_id in self._running]
        self.drafts = {}
        if not self.ahead:
            return done
        before, self.flying = self.flying, done or None
        return before or []

    @property
    def max_running(self) -> int:
        return self.seats

    @property
    def in_flight(self) -> int:
        return int(self.flying is not None)

    def settle(self) -> list[SampleStep]:
        done, self.flying = self.flying, None
        return done or []

    def decoding(self) -> list[EngineSampleState]:
        return [
            EngineSampleState(
                sample_id, list(request.prompt), response, 16, len(request.prompt) + len(response)
            )
            for sample_id, request in self.requests.items()
            for response in (self.responses[sample_id],)
            if sample_id in self._running
        ]

    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        self.drafts = {sample_id: list(tokens) for sample_id, tokens in drafts.items()}
        return drafts

    def keepable(self) -> list[str]:
        return [sample_id for sample_id in self._running if self.responses[sample_id]]

    def apply_weights(
        self, tensors: Iterable[tuple[str, Any]], *, preempt: bool = False, keep: Collection[str] = ()
    ) -> int:
        self.wake()
        assert set(keep) <= set(self.keepable())
        self.kept.append(set(keep))
        assert preempt or not self.requests, "samples hold KV of the old weights"
        self.applied.append(dict(tensors))
        if self.apply_fault is not None:
            raise self.apply_fault
        return 7

    def sleep(self) -> None:
        assert not self.requests, "an engine with samples cannot sleep"
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    @property
    def has_work(self) -> bool:
        return self.permits > 0 and (bool(self.requests or self.flying) or self.fault is not None)

    @property
    def load(self) -> EngineLoad:
        if self.load_fault is not None:
            raise self.load_fault
        running = len(self._running)
        return EngineLoad(running, len(self.requests) - running, running / self.seats)

    @property
    def _running(self) -> list[str]:
        return list(self.requests)[: self.seats]

    def _step(self, sample_id: str) -> SampleStep:
        request, response = self.requests[sample_id], self.responses[sample_id]
        draft, accepted = self.drafts.get(sample_id, []), 0
        following = request.follows and sample_id not in self.released
        tokens: list[int] = []
        reused = 0
        while len(tokens) <= len(draft):
            position = len(response) + len(tokens)
            following = following and position < len(request.cached) and request.cached[position] != REFUSED
            tokens.append(request.cached[position] if following else position)
            reused += following
            if len(tokens) > len(draft) or tokens[-1] != draft[len(tokens) - 1]:
                break
            accepted += 1
        if not following:
            self.released.add(sample_id)
        finish = self._finish(request, response, tokens)
        reused = min(reused, len(tokens))
        response += tokens
        if finish is not None:
            self._forget(sample_id)
        logprobs = [-float(token) for token in tokens]
        verified = logprobs[:reused]
        begin = len(response) - len(tokens)
        logprobs[:reused] = request.cached_logprobs[begin : begin + reused]
        coming = self.contexts.get(request.prompt)
        told = tokens if request.near_ties else []
        return SampleStep(
            sample_id,
            tokens,
            logprobs,
            finish,
            len(draft),
            accepted,
            reused,
            verified,
            top_token_ids=[RUNNER_UP + token for token in told],
            top_logprobs=[self.ties.get(begin + place, FAR) for place in range(len(told))],
            cached_context=coming.pop(0) if coming else None,
        )

    def _finish(self, request: EngineRequest, response: list[int], tokens: list[int]) -> Finish | None:
        if self.errors.get(request.prompt) in tokens:
            tokens.clear()
            return Finish.ERROR
        most = request.sampling.max_tokens
        if most is not None and len(response) + len(tokens) >= most:
            del tokens[most - len(response) :]
            return Finish.LENGTH
        return None

    def _forget(self, sample_id: str) -> None:
        self.requests.pop(sample_id, None)
        self.responses.pop(sample_id, None)


def settled(loop: EngineLoop) -> bool:
    """Return True once the loop has nothing left to step and its streams have what it made.

    An idle loop flushes after the commands of its turn, so a command may run between the last step and that flush.
    """
    busy = loop._engine.has_work and not loop.paused
    return not busy and loop._flushed_at == loop.now


@asynccontextmanager
async def held_up(loop: EngineLoop, before: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """Keep the engine thread in a command, as a step that does not return would, once it has called `before`."""
    begun, over = threading.Event(), threading.Event()

    def command() -> None:
        before()
        begun.set()
        over.wait()

    call = loop.call(command)
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        yield
    finally:
        over.set()
        await asyncio.wrap_future(call)


def scripted_loop(
    engine: ScriptedEngine,
    drafts: SampleDrafts,
    metrics: EngineMetrics,
    *,
    threshold: int = 0,
    **settings: Any,
) -> EngineLoop:
    """Return a loop over an engine, not started. `threshold`: real samples that leave place for background ones."""
    samples = SampleTable(metrics.background, threshold)
    return EngineLoop(lambda: (engine, drafts), metrics, samples, **settings)


def sample_request(
    sample_id: str, prompt: Sequence[int] = (5,), max_tokens: int | None = None, **fields: Any
) -> EngineRequest:
    """Return a request for a response of a given length."""
    prefix = tuple(fields.pop("prefix", ()))
    sampling = Sampling(max_tokens=max_tokens, json_schema=fields.pop("json_schema", ""))
    return EngineRequest(sample_id, tuple(prompt), prefix, sampling, fields.pop("seed", 1), **fields)
