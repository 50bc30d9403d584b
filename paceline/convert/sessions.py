"""Translate tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from paceline import types as t
from paceline.v1 import rollout_pb2, sample_pb2


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
