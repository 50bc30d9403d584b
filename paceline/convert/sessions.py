"""Translate tool calls, and what follows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from paceline import types as t
from paceline.times import duration
from paceline.v1 import rollout_pb2, sample_pb2


def tools_to_proto(tools: t.ToolUse) -> sample_pb2.ToolUse:
    """Return the message; fields that are None stay unset."""
    strings = tools.call_strings
    return sample_pb2.ToolUse(
        call_token_ids=tools.call_token_ids,
        # A lone string is a sequence of strings too: of its characters.
        call_strings=[strings] if isinstance(strings, str) else strings,
        max_calls=tools.max_calls,
        max_wait=None if tools.max_wait is None else duration(tools.max_wait),
    )


def continuation_to_proto(continuation: t.Continuation) -> rollout_pb2.Continuation:
    """Return the message; token ids may be any integer sequence, numpy included."""
    return rollout_pb2.Continuation(
        prompt_id=continuation.prompt_id,
        slot=continuation.slot,
        position=continuation.position,
        token_ids=continuation.token_ids,
        end=continuation.end,
    )


def environment_spans(messages: Iterable[sample_pb2.EnvironmentSpan]) -> tuple[t.EnvironmentSpan, ...]:
    """Return which tokens came from an environment."""
    return tuple(t.EnvironmentSpan(each.begin, each.end) for each in messages)


def sample_calls(answer: rollout_pb2.StreamRolloutsResponse) -> Iterator[t.SampleCall]:
    """Yield the calls of an event."""
    for each in answer.calls:
        yield t.SampleCall(
            prompt_id=each.prompt_id,
            slot=each.slot,
            number=each.number,
            begin=each.begin,
            token_ids=np.array(each.token_ids, np.int64),
            logprobs=np.array(each.logprobs, np.float32),
            version_spans=tuple(t.VersionSpan(s.begin, s.end, s.policy_version) for s in each.version_spans),
            environment_spans=environment_spans(each.environment_spans),
        )
