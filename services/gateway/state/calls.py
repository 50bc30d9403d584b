"""Tool calls of samples: the rules of a batch, the waiting calls, and the effect of an answer. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from paceline.errors import Violation
from paceline.times import seconds_of
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.errors import AlreadyExists, FailedPrecondition, ServiceError
from services.contracts.sampling import ModelLimits, check_tokens
from services.gateway.state.sample import BatchGroup, GatewaySample, SamplePhase


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules of a batch: tokens and strings that make a call, most calls of a sample, and the longest wait."""

    token_ids: frozenset[int]
    strings: frozenset[str]
    most: int
    wait_seconds: float

    @classmethod
    def of(cls, tools: sample_pb2.ToolUse, most: int, wait_seconds: float) -> CallRules:
        """Return the rules of a request, with the gateway's `most` and `wait_seconds` as defaults."""
        wait = seconds_of(tools.max_wait) if tools.HasField("max_wait") else wait_seconds
        return cls(
            frozenset(tools.call_token_ids), frozenset(tools.call_strings), tools.max_calls or most, wait
        )

    def is_call(self, last_token: int, stop_string: str) -> bool:
        """Return True if a sample that stopped has called a tool."""
        return stop_string in self.strings or last_token in self.token_ids


def with_calls(sampling: sample_pb2.SamplingParams, tools: sample_pb2.ToolUse) -> sample_pb2.SamplingParams:
    """Return sampling parameters with which samples also stop at calls."""
    if not (tools.call_token_ids or tools.call_strings):
        return sampling
    stopping = sample_pb2.SamplingParams()
    stopping.CopyFrom(sampling)
    stopping.stop_token_ids.extend(tools.call_token_ids)
    stopping.stop.extend(tools.call_strings)
    return stopping


class WaitingCalls:
    """Samples of a batch whose calls may be delivered, in that order. Each change is O(1)."""

    def __init__(self) -> None:
        # Sample index -> number, and the time at which its wait began.
        self._calls: dict[int, tuple[int, float]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, index: int) -> bool:
        return index in self._calls

    def add(self, index: int, now: float) -> None:
        """Add a sample that waits from now on; a known sample keeps its place."""
        if index not in self._calls:
            self._calls[index] = (next(self._numbers), now)

    def discard(self, index: int) -> float | None:
        """Remove a sample; return the time at which its wait began, None if it did not wait."""
        number_and_since = self._calls.pop(index, None)
        return None if number_and_since is None else number_and_since[1]

    def after(self, number: int) -> list[tuple[int, int]]:
        """Return (number, sample index) of all calls after `number`, in time proportional to their count."""
        found = []
        for index in reversed(self._calls):
            own = self._calls[index][0]
            if own <= number:
                break
            found.append((own, index))
        return found[::-1]

    def overdue(self, before: float) -> list[int]:
        """Return the samples whose wait began before a time, in time proportional to their count."""
        found = []
        for index, (_, since) in self._calls.items():
            if since >= before:
                break
            found.append(index)
        return found


class CallAnswer(enum.Enum):
    """Effect of a continuation on its sample."""

    RESUME = "resume"
    END = "end"
    # It was made before, or the sample has ended.
    SKIP = "skip"


def effect_of_continuation(
    sample: GatewaySample, continuation: rollout_pb2.Continuation, field: str
) -> CallAnswer:
    """Return the effect of a continuation.

    Raises:
        AlreadyExists: the sample has continued with other tokens.
        FailedPrecondition: the sample does not wait at this position.
    """
    name = f"prompt {continuation.prompt_id!r} slot {continuation.slot}"
    if sample.phase is SamplePhase.ENDED:
        return CallAnswer.SKIP
    position = continuation.position
    if sample.phase is SamplePhase.CALLING and position == len(sample.tokens):
        return CallAnswer.END if continuation.end else CallAnswer.RESUME
    end = next((end for begin, end in sample.environment if begin == position), None)
    if end is None:
        raise _not_calling(sample, name, field, position)
    if continuation.end or list(continuation.token_ids) != sample.tokens[position:end].tolist():
        raise AlreadyExists(
            "continuation", name, f"{field}: {name} has continued with other tokens at position {position}"
        )
    return CallAnswer.SKIP


def _not_calling(sample: GatewaySample, name: str, field: str, position: int) -> ServiceError:
    calls = (
        f"it waits at position {len(sample.tokens)}"
        if sample.phase is SamplePhase.CALLING
        else "it waits for none"
    )
    return FailedPrecondition(
        "SAMPLE_NOT_CALLING",
        f"{field}.position is {position}, where {name} does not wait for its environment: {calls}",
        field=f"{field}.position",
        position=str(position),
    )


def check_continuation(
    continuation: rollout_pb2.Continuation, group: BatchGroup, limits: ModelLimits, field: str
) -> list[Violation]:
    """Return the violations in the tokens of a continuation; after them there must be room for one more token."""
    given, field = continuation.token_ids, f"{field}.token_ids"
    if continuation.end:
        return [Violation(field, f"has {len(given)} tokens; there are none with `end`")] if given else []
    found = check_tokens(given, limits, field)
    room = limits.max_model_len - len(group.prompt_token_ids)
    if group.sampling.HasField("max_tokens"):
        room = min(room, group.sampling.max_tokens)
    left = max(0, room - continuation.position - 1)
    if len(given) > left:
        found.append(
            Violation(
                field,
                f"has {len(given)} tokens; the sample has room for {left} after position {continuation.position}, "
                f"as the response may have {room} and one has to be sampled: shorten them, or end the sample",
            )
        )
    return found


def sample_call(sample: GatewaySample, group: BatchGroup, *, whole: bool = False) -> rollout_pb2.SampleCall:
    """Return the call of a calling sample as the trainer gets it; with `whole`, with the whole response so far."""
    begin = 0 if whole or not sample.environment else sample.environment[-1][1]
    return rollout_pb2.SampleCall(
        prompt_id=group.prompt_id,
        slot=sample.slot,
        number=len(sample.calls),
        begin=begin,
        tokens=sample.columns.message(begin),
        environment_spans=environment_spans(sample.environment, begin),
    )


def environment_spans(spans: Iterable[tuple[int, int]], begin: int) -> list[sample_pb2.EnvironmentSpan]:
    """Return the spans that begin at `begin` or later."""
    return [sample_pb2.EnvironmentSpan(begin=first, end=end) for first, end in spans if first >= begin]
