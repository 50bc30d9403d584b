"""What an instance keeps of each sample it is generating, and the stream that the sample belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.drafts.rollout import Rollout
from services.generation.engine.types import Finish, SampleRequest, SampleStep, Verifier
from services.generation.rollouts.agreement import agreement
from services.generation.rollouts.origin import NOWHERE, Origin
from services.platform import tracing
from services.platform.tracing import NO_SPAN, Span

_FINISH_REASONS = {
    Finish.STOP: sample_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: sample_pb2.FINISH_REASON_LENGTH,
}
# Weight of the newest verify step in a sample's mean acceptance.
_ACCEPTANCE_SMOOTHING = 0.2


class SampleStream(Protocol):
    """What the engine loop uses of the stream that a sample belongs to. Called in the engine thread."""

    background: bool
    """Its samples run only while the engine has nothing real to do."""
    samples: dict[int, RunningSample]
    """Its samples that are in the engine, by handle."""

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """A sample has ended."""

    def refuse(self, event: pb.Refused) -> None:
        """An item is not taken, or its sample cannot go on."""

    def flush(self, load: fleet_pb2.InstanceLoad, policy_version: int) -> None:
        """Hand what has come together to the event loop."""

    def put(self, event: Exception | None) -> None:
        """The end: None, or the error that the engine ended with."""


@dataclass(slots=True)
class DraftCount:
    """Tokens of one drafter that were verified for a sample, and those that were kept."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RunningSample:
    """A sample in the engine. Times are seconds of the loop's clock; `tokens` wait for the next flush.

    `response` is all of it, prefix included, and `rollout` the cached one that was made with the same seed.
    """

    handle: int
    request: SampleRequest
    stream: SampleStream
    arrived: float
    started: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generated: int = 0
    decode_steps: int = 0
    verify_steps: int = 0
    drafts: dict[str, DraftCount] = field(default_factory=dict)
    # Of the taken-over tokens among `tokens`: log-probabilities under the current policy.
    verified_logprobs: list[float] = field(default_factory=list)
    # As in pb.Finished. `reused_prefix` of a LENIENT sample counts the tokens taken over.
    cached_tokens: int = 0
    reused_prefix: int = 0
    origin: Origin = NOWHERE
    rollout: Rollout | None = None
    # From its arrival until it leaves the engine.
    trace: Span = NO_SPAN
    # Draft tokens accepted per verify step, of late; 0 when nothing was verified.
    acceptance: float = 0.0
    # Moves between instances, and what is told when the first step after one has ended.
    migrations: int = 0
    resumed: Callable[[], None] | None = None
    response: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.response = list(self.request.prefix)

    def follow(self, rollout: Rollout) -> bool:
        """Compare the sample with a rollout of its own seed. False when the one that it has is as long.

        Of a LENIENT sample only the cached rollout that it takes over is counted.
        """
        if self.rollout is not None and len(self.rollout.tokens) >= len(rollout.tokens):
            return False
        self.rollout = rollout
        if self.request.verifier is not Verifier.LENIENT:
            self.cached_tokens = len(rollout.tokens)
        return True

    def record(self, step: SampleStep, began: float, drafter: str) -> None:
        """Take over what a step, begun at `began`, did for the sample."""
        if self.started is None:
            self.started = began
            self.trace.event("first_step")
        self.tokens.extend(step.token_ids)
        self.logprobs.extend(step.logprobs)
        self.verified_logprobs.extend(step.verified_logprobs)
        self.reused_prefix += step.reused
        self.response.extend(step.token_ids)
        self.generated += len(step.token_ids)
        self.decode_steps += 1
        if self.resumed is not None:
            self.resumed()
            self.resumed = None
        if step.drafted:
            weight = _ACCEPTANCE_SMOOTHING if self.verify_steps else 1.0
            self.acceptance += (step.accepted - self.acceptance) * weight
            self.verify_steps += 1
            count = self.drafts.setdefault(drafter, DraftCount())
            count.drafted += step.drafted
            count.accepted += step.accepted

    def entered(self, trace_parent: str) -> None:
        """The sample is in the engine: the beginning of its span, under this traceparent."""
        self.trace = tracing.begin(
            "generate",
            trace_parent,
            run_id=self.origin.run_id,
            prompt_id=self.request.prompt_id,
            slot=self.origin.slot,
            step=self.origin.step,
            prefix_tokens=len(self.request.prefix),
        )

    def left(self) -> None:
        """The sample is in the engine no more: the end of its span."""
        drafts = self.drafts.values()
        self.trace.end(
            tokens=self.generated,
            decode_steps=self.decode_steps,
            verify_steps=self.verify_steps,
            drafted=sum(count.drafted for count in drafts),
            accepted=sum(count.accepted for count in drafts),
        )

    def take_delta(self) -> pb.Delta | None:
        """The tokens since the last call, or None when there are none."""
        if not self.tokens:
            return None
        delta = pb.Delta(
            handle=self.handle,
            token_ids=self.tokens,
            logprobs=self.logprobs,
            verified_logprobs=self.verified_logprobs,
        )
        self.tokens, self.logprobs, self.verified_logprobs = [], [], []
        return delta

    def finished(self, finish: Finish | None, now: float) -> pb.Finished:
        """The closing event. `finish` is None when the sample was ended from outside."""
        started = self.arrived if self.started is None else self.started
        reason = sample_pb2.FINISH_REASON_ABORTED if finish is None else _FINISH_REASONS[finish]
        if self.rollout is not None and self.request.verifier is not Verifier.LENIENT:
            self.reused_prefix = agreement(self.rollout, self.response)
        return pb.Finished(
            handle=self.handle,
            finish_reason=reason,
            draft_sources=[
                sample_pb2.DraftSource(drafter=name, drafted=count.drafted, accepted=count.accepted)
                for name, count in self.drafts.items()
            ],
            decode_steps=self.decode_steps,
            verify_steps=self.verify_steps,
            queue_seconds=started - self.arrived,
            generation_seconds=now - started if self.started is not None else 0.0,
            reused_prefix=self.reused_prefix,
            cached_tokens=self.cached_tokens,
        )

    def unsampleable(self) -> pb.Refused:
        """The refusal of a sample whose logits were NaN: no other sample is touched by it."""
        position = len(self.request.prefix) + self.generated
        return pb.Refused(
            handle=self.handle,
            code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
            message=f"the model gives no finite logits at response position {position}",
            field="prompt_token_ids",
        )


class WorkStream:
    """One caller's stream: the samples it brought, and the events it has not been sent.

    Filled by the engine thread, emptied by the event loop. `None` in the outbox ends the stream; an exception
    ends it with that error.
    """

    background = False

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self.outbox: asyncio.Queue[pb.WorkResponse | Exception | None] = asyncio.Queue()
        self.samples: dict[int, RunningSample] = {}
        # Items that wait for their cached rollouts before they start, by handle.
        self.parked: dict[int, pb.WorkItem] = {}
        self._finished: list[pb.Finished] = []
        self._refused: list[pb.Refused] = []
        self._moved: list[pb.Moved] = []
        self._last_deltas: list[pb.Delta] = []

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Note the end of a sample; its last tokens go out before it, in the same response."""
        self._last(sample)
        self._finished.append(event)

    def move(self, sample: RunningSample, event: pb.Moved) -> None:
        """Note that a sample runs elsewhere now; its last tokens go out before that, in the same response."""
        self._last(sample)
        self._moved.append(event)

    def _last(self, sample: RunningSample) -> None:
        delta = sample.take_delta()
        if delta is not None:
            self._last_deltas.append(delta)
        self.samples.pop(sample.handle, None)

    def finish_unstarted(self, handle: int) -> None:
        """Note the end of an item that was aborted before it started."""
        reason = sample_pb2.FINISH_REASON_ABORTED
        self._finished.append(pb.Finished(handle=handle, finish_reason=reason))

    def refuse(self, event: pb.Refused) -> None:
        """Note an item that is not taken."""
        self._refused.append(event)

    def flush(self, load: fleet_pb2.InstanceLoad, policy_version: int) -> None:
        """Hand everything that is waiting to the event loop, as one response."""
        deltas = [delta for sample in self.samples.values() if (delta := sample.take_delta())]
        deltas += self._last_deltas
        if not (deltas or self._finished or self._refused or self._moved):
            return
        self.put(
            pb.WorkResponse(
                deltas=deltas,
                finished=self._finished,
                refused=self._refused,
                moved=self._moved,
                load=load,
                policy_version=policy_version,
            )
        )
        self._finished, self._refused, self._moved, self._last_deltas = [], [], [], []

    def put(self, event: pb.WorkResponse | Exception | None) -> None:
        """Append to the outbox from any thread."""
        self._events.call_soon_threadsafe(self.outbox.put_nowait, event)
