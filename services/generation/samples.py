"""What an instance keeps of each sample it is generating, and the stream that the sample belongs to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import fleet_pb2, sample_pb2
from services.generation.engine.types import Finish, SampleRequest, SampleStep

_FINISH_REASONS = {
    Finish.STOP: sample_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: sample_pb2.FINISH_REASON_LENGTH,
}


@dataclass(slots=True)
class DraftCount:
    """Tokens of one drafter that were verified for a sample, and those that were kept."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RunningSample:
    """A sample in the engine. Times are seconds of the loop's clock; `tokens` wait for the next flush."""

    handle: int
    request: SampleRequest
    stream: WorkStream
    arrived: float
    started: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generated: int = 0
    decode_steps: int = 0
    verify_steps: int = 0
    drafts: dict[str, DraftCount] = field(default_factory=dict)

    def record(self, step: SampleStep, began: float, drafter: str) -> None:
        """Take over what a step, begun at `began`, did for the sample."""
        if self.started is None:
            self.started = began
        self.tokens.extend(step.token_ids)
        self.logprobs.extend(step.logprobs)
        self.generated += len(step.token_ids)
        self.decode_steps += 1
        if step.drafted:
            self.verify_steps += 1
            count = self.drafts.setdefault(drafter, DraftCount())
            count.drafted += step.drafted
            count.accepted += step.accepted

    def take_delta(self) -> pb.Delta | None:
        """The tokens since the last call, or None when there are none."""
        if not self.tokens:
            return None
        delta = pb.Delta(handle=self.handle, token_ids=self.tokens, logprobs=self.logprobs)
        self.tokens, self.logprobs = [], []
        return delta

    def finished(self, finish: Finish | None, now: float) -> pb.Finished:
        """The closing event. `finish` is None when the sample was ended from outside."""
        started = self.arrived if self.started is None else self.started
        reason = sample_pb2.FINISH_REASON_ABORTED if finish is None else _FINISH_REASONS[finish]
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
        )


class WorkStream:
    """One caller's stream: the samples it brought, and the events it has not been sent.

    Filled by the engine thread, emptied by the event loop. `None` in the outbox ends the stream; an exception
    ends it with that error.
    """

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self.outbox: asyncio.Queue[pb.WorkResponse | Exception | None] = asyncio.Queue()
        self.samples: dict[int, RunningSample] = {}
        self._finished: list[pb.Finished] = []
        self._refused: list[pb.Refused] = []
        self._last_deltas: list[pb.Delta] = []

    def finish(self, sample: RunningSample, event: pb.Finished) -> None:
        """Note the end of a sample; its last tokens go out before it, in the same response."""
        delta = sample.take_delta()
        if delta is not None:
            self._last_deltas.append(delta)
        self._finished.append(event)
        self.samples.pop(sample.handle, None)

    def refuse(self, event: pb.Refused) -> None:
        """Note an item that is not taken."""
        self._refused.append(event)

    def flush(self, load: fleet_pb2.InstanceLoad, policy_version: int) -> None:
        """Hand everything that is waiting to the event loop, as one response."""
        deltas = [delta for sample in self.samples.values() if (delta := sample.take_delta())]
        deltas += self._last_deltas
        if not (deltas or self._finished or self._refused):
            return
        self.put(
            pb.WorkResponse(
                deltas=deltas,
                finished=self._finished,
                refused=self._refused,
                load=load,
                policy_version=policy_version,
            )
        )
        self._finished, self._refused, self._last_deltas = [], [], []

    def put(self, event: pb.WorkResponse | Exception | None) -> None:
        """Append to the outbox from any thread."""
        self._events.call_soon_threadsafe(self.outbox.put_nowait, event)
