"""Translate messages into samples, and what else answers requests for rollouts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from google.rpc import code_pb2

from paceline import types as t
from paceline.convert.enums import EnumPair
from paceline.convert.sessions import environment_spans
from paceline.times import seconds_of
from paceline.v1 import rollout_pb2, sample_pb2

_LEVEL = EnumPair(t.ExactnessLevel, sample_pb2.ExactnessLevel, "EXACTNESS_LEVEL")
_REASON = EnumPair(t.FinishReason, sample_pb2.FinishReason, "FINISH_REASON")
_STATUS = EnumPair(t.SampleStatus, sample_pb2.SampleStatus, "SAMPLE_STATUS")


def submitted(answer: rollout_pb2.SubmitRolloutsResponse) -> t.Submitted:
    """Return the answer to a submission."""
    return t.Submitted(answer.batch_id, answer.samples, answer.already_submitted)


def exactness(message: sample_pb2.Exactness) -> t.Exactness:
    """Return the exactness that a sample has."""
    return t.Exactness(
        level=_LEVEL.member(message.level),
        lenience=message.lenience if message.HasField("lenience") else None,
        reuse_delay=message.reuse_delay,
        kl_target=message.kl_target if message.HasField("kl_target") else None,
        diversity_floor=message.diversity_floor if message.HasField("diversity_floor") else None,
    )


def provenance(message: sample_pb2.Provenance) -> t.Provenance:
    """Return the provenance of a sample."""
    return t.Provenance(
        draft_sources=tuple(t.DraftSource(s.drafter, s.drafted, s.accepted) for s in message.draft_sources),
        drafted=message.drafted,
        accepted=message.accepted,
        decode_steps=message.decode_steps,
        verify_steps=message.verify_steps,
        reused_prefix=message.reused_prefix,
        migrations=message.migrations,
        resubmissions=message.resubmissions,
        exactness=exactness(message.exactness),
        lossless=message.lossless,
        instance_spans=tuple(
            t.InstanceSpan(
                s.instance_id,
                s.begin_token,
                s.end_token,
                seconds_of(s.begin),
                seconds_of(s.end),
                s.cached_context_tokens,
            )
            for s in message.instance_spans
        ),
        queue_seconds=seconds_of(message.queue_time),
        generation_seconds=seconds_of(message.generation_time),
        cached_tokens=message.cached_tokens,
    )


def sample(message: sample_pb2.Sample) -> t.Sample:
    """Return one response, its tokens as arrays."""
    top_token_ids, top_logprobs = _likeliest(message, len(message.token_ids))
    return t.Sample(
        prompt_id=message.prompt_id,
        slot=message.slot,
        token_ids=np.array(message.token_ids, np.int64),
        logprobs=np.array(message.logprobs, np.float32),
        finish_reason=_REASON.member(message.finish_reason),
        status=_STATUS.member(message.status),
        version_spans=tuple(t.VersionSpan(s.begin, s.end, s.policy_version) for s in message.version_spans),
        provenance=provenance(message.provenance),
        seed=message.seed,
        error=message.error,
        nonfinite_logprobs=tuple(message.nonfinite_logprobs),
        stop_string=message.stop_string,
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
        prompt_logprobs=_prompt_logprobs(message) if message.HasField("prompt_logprobs") else None,
        environment_spans=environment_spans(message.environment_spans),
        calls=tuple(message.calls),
        failure=_failure(message.failure) if message.HasField("failure") else None,
    )


def _failure(message: sample_pb2.SampleFailure) -> t.SampleFailure:
    known = message.code in code_pb2.Code.values()
    code = code_pb2.Code.Name(code_pb2.Code.ValueType(message.code)) if known else "UNKNOWN"
    return t.SampleFailure(code, message.field, message.reason)


def _prompt_logprobs(message: sample_pb2.Sample) -> t.PromptLogprobs:
    told = message.prompt_logprobs
    logprobs = np.array(told.logprobs, np.float32)
    return t.PromptLogprobs(logprobs, *_likeliest(told, len(logprobs)))


def _likeliest(
    message: sample_pb2.Sample | sample_pb2.PromptLogprobs | rollout_pb2.TokenDelta, tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the likeliest tokens of each position and their log-probabilities, [tokens, k] each."""
    shape = (tokens, len(message.top_token_ids) // max(1, tokens))
    ids, logprobs = np.array(message.top_token_ids, np.int64), np.array(message.top_logprobs, np.float32)
    return ids.reshape(shape), logprobs.reshape(shape)


def generate_events(answer: rollout_pb2.GenerateResponse) -> Iterator[t.TokenDelta | t.Sample]:
    """Yield a delta, or the whole sample at the end."""
    if answer.WhichOneof("event") == "sample":
        yield sample(answer.sample)
    else:
        delta = answer.delta
        tokens, logprobs = np.array(delta.token_ids, np.int64), np.array(delta.logprobs, np.float32)
        yield t.TokenDelta(tokens, logprobs, *_likeliest(delta, len(tokens)))


def batch_status(message: rollout_pb2.BatchStatus) -> t.BatchStatus:
    """Return the progress of a batch."""
    return t.BatchStatus(
        run_id=message.run_id,
        batch_id=message.batch_id,
        step=message.step,
        policy_version=message.policy_version,
        accepted_at=message.accepted_at.ToNanoseconds() / 1e9,
        total=message.total,
        finished=message.finished,
        acknowledged=message.acknowledged,
        cursor=message.cursor,
        open=message.open,
    )
