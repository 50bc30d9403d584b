"""Translate requests for rollouts into messages, and messages into samples and other answers.

Errors name fields by their paths, such as groups[3].samples. Functions named `whole_` return a request with all
iterators read, so that it can be counted and sent more than once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any, TypeVar

from google.rpc import code_pb2

from paceline import types as t
from paceline.columns import arrays_of
from paceline.convert import values
from paceline.convert.values import EnumPair, message, record
from paceline.times import duration, seconds_of
from paceline.v1 import rollout_pb2, sample_pb2

R = TypeVar("R")
M = TypeVar("M", rollout_pb2.SubmitRolloutsRequest, rollout_pb2.OpenBatchRequest)

_OPTIONAL_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "stop_token_ids",
    "stop",
    "allowed_token_ids",
    "top_logprobs",
    "ignore_eos",
)
_MODE = EnumPair(t.LogprobsMode, sample_pb2.LogprobsMode, "LOGPROBS_MODE")
_LEVEL = EnumPair(t.ExactnessLevel, sample_pb2.ExactnessLevel, "EXACTNESS_LEVEL")
_STALE = EnumPair(t.Stale, rollout_pb2.Stale, "STALE")
_REASON = EnumPair(t.FinishReason, sample_pb2.FinishReason, "FINISH_REASON")
_STATUS = EnumPair(t.SampleStatus, sample_pb2.SampleStatus, "SAMPLE_STATUS")


def sampling_to_proto(params: t.SamplingParams, at: str = "sampling") -> sample_pb2.SamplingParams:
    """Return the message; fields that are None stay unset."""
    record(params, t.SamplingParams, at)
    return message(
        sample_pb2.SamplingParams,
        at,
        **{name: getattr(params, name) for name in _OPTIONAL_SAMPLING},
        json_schema=_json(params.json_schema, f"{at}.json_schema"),
        logprobs_mode=_MODE.number(params.logprobs_mode, f"{at}.logprobs_mode"),
    )


def exactness_to_proto(exactness: t.Exactness, at: str = "exactness") -> sample_pb2.Exactness:
    """Return the message; fields that are None stay unset."""
    record(exactness, t.Exactness, at)
    return message(
        sample_pb2.Exactness,
        at,
        level=_LEVEL.number(exactness.level, f"{at}.level"),
        lenience=exactness.lenience,
        reuse_delay=exactness.reuse_delay,
        kl_target=exactness.kl_target,
        diversity_floor=exactness.diversity_floor,
    )


def tools_to_proto(tools: t.ToolUse, at: str = "tools") -> sample_pb2.ToolUse:
    """Return the message; fields that are None stay unset."""
    record(tools, t.ToolUse, at)
    return message(
        sample_pb2.ToolUse,
        at,
        call_token_ids=tools.call_token_ids,
        call_strings=tools.call_strings,
        max_calls=tools.max_calls,
        max_wait=None
        if tools.max_wait is None
        else duration(values.seconds(tools.max_wait, f"{at}.max_wait")),
    )


def groups_to_proto(groups: Iterable[t.Group]) -> list[rollout_pb2.Group]:
    """Return the messages of groups in their order; prompt token ids may be any sequence of integers."""
    return [
        message(
            rollout_pb2.Group,
            at,
            prompt_id=each.prompt_id,
            prompt_token_ids=each.prompt_token_ids,
            samples=each.samples,
            sampling=None if each.sampling is None else sampling_to_proto(each.sampling, f"{at}.sampling"),
            expected_tokens=each.expected_tokens,
        )
        for each, at in _records(groups, "groups", t.Group)
    ]


def whole_groups(groups: Iterable[t.Group]) -> list[t.Group]:
    """Return groups whose fields are Python's own types."""
    return [
        replace(
            each,
            prompt_id=values.text(each.prompt_id, f"{at}.prompt_id"),
            prompt_token_ids=values.integers(each.prompt_token_ids, f"{at}.prompt_token_ids", *values.UINT32),
            samples=values.integer(each.samples, f"{at}.samples", *values.UINT32),
            sampling=None if each.sampling is None else whole_sampling(each.sampling, f"{at}.sampling"),
            expected_tokens=values.integer(each.expected_tokens, f"{at}.expected_tokens", *values.UINT32),
        )
        for each, at in _records(groups, "groups", t.Group)
    ]


def whole_sampling(params: t.SamplingParams, at: str = "sampling") -> t.SamplingParams:
    """Return parameters whose iterators were read."""
    sent = sampling_to_proto(params, at)
    return replace(
        params,
        stop_token_ids=tuple(sent.stop_token_ids),
        stop=tuple(sent.stop),
        allowed_token_ids=tuple(sent.allowed_token_ids),
        json_schema=sent.json_schema,
    )


def whole_tools(tools: t.ToolUse) -> t.ToolUse:
    """Return rules whose iterators were read."""
    sent = tools_to_proto(tools)
    return replace(tools, call_token_ids=tuple(sent.call_token_ids), call_strings=tuple(sent.call_strings))


def whole_batch(batch: t.Batch) -> t.Batch:
    """Return a batch that can be counted, and sent more than once."""
    record(batch, t.Batch, "batch")
    return replace(
        batch,
        groups=whole_groups(batch.groups),
        sampling=whole_sampling(batch.sampling),
        tools=None if batch.tools is None else whole_tools(batch.tools),
    )


def batch_to_proto(batch: t.Batch, kind: type[M]) -> M:
    """Return the request that submits a batch, or the one that opens it, whose groups are added afterwards."""
    record(batch, t.Batch, "batch")
    stale = _STALE.number(batch.stale, "stale")
    request = message(
        kind,
        run_id=batch.run_id,
        batch_id=batch.batch_id,
        step=batch.step,
        policy_version=batch.policy_version,
        sampling=sampling_to_proto(batch.sampling),
        exactness=exactness_to_proto(batch.exactness),
        run_seed=batch.run_seed,
        priority=batch.priority,
        weight=batch.weight,
        deadline=None if batch.deadline is None else duration(values.seconds(batch.deadline, "deadline")),
        max_staleness=batch.max_staleness,
        stale=0 if batch.max_staleness is None else stale,
        tools=None if batch.tools is None else tools_to_proto(batch.tools),
    )
    if isinstance(request, rollout_pb2.SubmitRolloutsRequest):
        request.groups.extend(groups_to_proto(batch.groups))
    return request


def hint_to_proto(hint: t.BatchHint) -> rollout_pb2.HintNextBatchRequest:
    """Return the whole hint."""
    record(hint, t.BatchHint, "hint")
    return message(
        rollout_pb2.HintNextBatchRequest,
        run_id=hint.run_id,
        step=hint.step,
        policy_version=hint.policy_version,
        groups=groups_to_proto(hint.groups),
        sampling=sampling_to_proto(hint.sampling),
        exactness=exactness_to_proto(hint.exactness),
        run_seed=hint.run_seed,
    )


def sample_request_to_proto(request: t.SampleRequest) -> rollout_pb2.GenerateRequest:
    """Return the whole request."""
    record(request, t.SampleRequest, "request")
    return message(
        rollout_pb2.GenerateRequest,
        run_id=request.run_id,
        prompt_id=request.prompt_id,
        slot=request.slot,
        step=request.step,
        policy_version=request.policy_version,
        prompt_token_ids=request.prompt_token_ids,
        prefix_token_ids=request.prefix_token_ids,
        prefix_logprobs=request.prefix_logprobs,
        sampling=sampling_to_proto(request.sampling),
        exactness=exactness_to_proto(request.exactness),
        run_seed=request.run_seed,
    )


def continuations_to_proto(continuations: Iterable[t.Continuation]) -> list[rollout_pb2.Continuation]:
    """Return the messages of answers to tool calls."""
    return [
        message(
            rollout_pb2.Continuation,
            at,
            prompt_id=each.prompt_id,
            slot=each.slot,
            position=each.position,
            token_ids=each.token_ids,
            end=each.end,
        )
        for each, at in _records(continuations, "continuations", t.Continuation)
    ]


def rewards_to_proto(rewards: Iterable[t.Reward]) -> list[rollout_pb2.Reward]:
    """Return the messages of rewards, which must be finite."""
    return [
        message(
            rollout_pb2.Reward,
            at,
            prompt_id=each.prompt_id,
            slot=each.slot,
            reward=values.finite(each.reward, f"{at}.reward"),
        )
        for each, at in _records(rewards, "rewards", t.Reward)
    ]


def whole_rewards(rewards: Iterable[t.Reward]) -> list[t.Reward]:
    """Return rewards whose fields are Python's own types."""
    return [t.Reward(each.prompt_id, each.slot, each.reward) for each in rewards_to_proto(rewards)]


def keys_to_proto(keys: Iterable[t.SampleKey]) -> list[rollout_pb2.SampleKey]:
    """Return the messages of sample keys."""
    return [
        message(rollout_pb2.SampleKey, at, prompt_id=each.prompt_id, slot=each.slot)
        for each, at in _records(keys, "samples", t.SampleKey)
    ]


def _records(given: Iterable[R], field: str, kind: type[R]) -> Iterator[tuple[R, str]]:
    """Yield the records in `given`, which must be of one type, each with its path."""
    if isinstance(given, kind):
        values.refuse(field, given, f"must be a sequence of paceline.{kind.__name__}")
    listed: Sequence[Any] = values.items(given, field, f"paceline.{kind.__name__}")
    for number, each in enumerate(listed):
        yield record(each, kind, f"{field}[{number}]"), f"{field}[{number}]"


def _json(value: Any, field: str) -> str:
    """Return a JSON schema as text."""
    if not isinstance(value, Mapping):
        return values.text(value, field)
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        values.refuse(field, value, f"must be JSON: {error}")


def version_spans(runs: Iterable[sample_pb2.VersionRun], begin: int = 0) -> tuple[t.VersionSpan, ...]:
    """Return the policy versions of response tokens, the first of which has the index `begin`."""
    spans = list[t.VersionSpan]()
    for (version, mixed), same in groupby(runs, lambda run: (run.policy_version, run.mixed_kv)):
        end = begin + sum(run.tokens for run in same)
        spans.append(t.VersionSpan(begin, end, version, mixed))
        begin = end
    return tuple(spans)


def sample_calls(answer: rollout_pb2.StreamRolloutsResponse) -> Iterator[t.SampleCall]:
    """Yield the tool calls of an event."""
    for each in answer.calls:
        yield t.SampleCall(
            prompt_id=each.prompt_id,
            slot=each.slot,
            number=each.number,
            begin=each.begin,
            **arrays_of(each.tokens),
            version_spans=version_spans(each.tokens.versions, each.begin),
            environment_spans=tuple(t.EnvironmentSpan(s.begin, s.end) for s in each.environment_spans),
        )


def provenance(message: sample_pb2.Provenance) -> t.Provenance:
    """Return the provenance of a sample."""
    exactness = message.exactness
    return t.Provenance(
        draft_sources=tuple(t.DraftSource(s.drafter, s.drafted, s.accepted) for s in message.draft_sources),
        drafted=message.drafted,
        accepted=message.accepted,
        decode_steps=message.decode_steps,
        verify_steps=message.verify_steps,
        reused_prefix=message.reused_prefix,
        migrations=message.migrations,
        resubmissions=message.resubmissions,
        exactness=t.Exactness(
            level=_LEVEL.member(exactness.level),
            lenience=exactness.lenience if exactness.HasField("lenience") else None,
            reuse_delay=exactness.reuse_delay,
            kl_target=exactness.kl_target if exactness.HasField("kl_target") else None,
            diversity_floor=exactness.diversity_floor if exactness.HasField("diversity_floor") else None,
        ),
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
    return t.Sample(
        **arrays_of(message.tokens),
        prompt_id=message.prompt_id,
        slot=message.slot,
        finish_reason=_REASON.member(message.finish_reason),
        status=_STATUS.member(message.status),
        version_spans=version_spans(message.tokens.versions),
        provenance=provenance(message.provenance),
        seed=message.seed,
        error=message.error,
        nonfinite_logprobs=tuple(message.nonfinite_logprobs),
        stop_string=message.stop_string,
        prompt_logprobs=_prompt_logprobs(message) if message.HasField("prompt_logprobs") else None,
        environment_spans=tuple(t.EnvironmentSpan(s.begin, s.end) for s in message.environment_spans),
        calls=tuple(message.calls),
        failure=_failure(message.failure) if message.HasField("failure") else None,
    )


def _failure(message: sample_pb2.SampleFailure) -> t.SampleFailure:
    known = message.code in code_pb2.Code.values()
    code = code_pb2.Code.Name(code_pb2.Code.ValueType(message.code)) if known else "UNKNOWN"
    return t.SampleFailure(code, message.field, message.reason)


def _prompt_logprobs(message: sample_pb2.Sample) -> t.PromptLogprobs:
    found = arrays_of(message.prompt_logprobs)
    return t.PromptLogprobs(**{each.name: found[each.name] for each in fields(t.PromptLogprobs)})


def generate_events(answer: rollout_pb2.GenerateResponse) -> Iterator[t.TokenDelta | t.Sample]:
    """Yield a delta, or the whole sample at the end."""
    if answer.WhichOneof("event") == "sample":
        yield sample(answer.sample)
    else:
        yield t.TokenDelta(**arrays_of(answer.delta))


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
