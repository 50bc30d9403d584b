"""Translates between the SDK's records and the protocol's messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf import json_format, struct_pb2, timestamp_pb2

from paceline import types as t
from paceline.v1 import fleet_pb2, rollout_pb2, sample_pb2, weight_pb2

E = TypeVar("E", bound=StrEnum)

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
)


class _Enum(Generic[E]):
    """One enum on both sides; numbers newer than this SDK become UNSPECIFIED."""

    def __init__(self, kind: type[E], wrapper: Any, prefix: str) -> None:
        pairs = {name.removeprefix(f"{prefix}_"): number for name, number in wrapper.items()}
        self._numbers = {member: pairs[member.name] for member in kind}
        self._members = {number: member for member, number in self._numbers.items()}
        self._unknown = kind.__members__.get("UNSPECIFIED")

    def number(self, member: E) -> Any:
        return self._numbers[member]

    def member(self, number: int) -> E:
        member = self._members.get(number, self._unknown)
        assert member is not None, f"no member for {number}"
        return member


_MODE = _Enum(t.LogprobsMode, sample_pb2.LogprobsMode, "LOGPROBS_MODE")
_LEVEL = _Enum(t.ExactnessLevel, sample_pb2.ExactnessLevel, "EXACTNESS_LEVEL")
_REASON = _Enum(t.FinishReason, sample_pb2.FinishReason, "FINISH_REASON")
_STATUS = _Enum(t.SampleStatus, sample_pb2.SampleStatus, "SAMPLE_STATUS")
_STATE = _Enum(t.InstanceState, fleet_pb2.InstanceState, "INSTANCE_STATE")
_TARGET = _Enum(t.WeightTarget, weight_pb2.WeightTarget, "WEIGHT_TARGET")


def _seconds(stamp: timestamp_pb2.Timestamp) -> float:
    return float(stamp.seconds + stamp.nanos * 1e-9)


# What is asked for.


def sampling_to_proto(params: t.SamplingParams) -> sample_pb2.SamplingParams:
    """Fields that are None stay unset."""
    given = {name: getattr(params, name) for name in _OPTIONAL_SAMPLING if getattr(params, name) is not None}
    return sample_pb2.SamplingParams(
        **given,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs_mode=_MODE.number(params.logprobs_mode),
    )


def exactness_to_proto(exactness: t.Exactness) -> sample_pb2.Exactness:
    """Fields that are None stay unset."""
    return sample_pb2.Exactness(
        level=_LEVEL.number(exactness.level),
        lenience=exactness.lenience,
        reuse_delay=exactness.reuse_delay,
        kl_target=exactness.kl_target,
        diversity_floor=exactness.diversity_floor,
    )


def group_to_proto(group: t.Group) -> rollout_pb2.Group:
    """Prompt ids may be any integer sequence, numpy included."""
    return rollout_pb2.Group(
        prompt_id=group.prompt_id,
        prompt_token_ids=group.prompt_token_ids,
        samples=group.samples,
        sampling=sampling_to_proto(group.sampling) if group.sampling else None,
        expected_tokens=group.expected_tokens,
    )


def batch_to_proto(batch: t.Batch) -> rollout_pb2.SubmitRolloutsRequest:
    """The whole submission."""
    request = rollout_pb2.SubmitRolloutsRequest(
        run_id=batch.run_id,
        batch_id=batch.batch_id,
        step=batch.step,
        policy_version=batch.policy_version,
        groups=[group_to_proto(group) for group in batch.groups],
        sampling=sampling_to_proto(batch.sampling),
        exactness=exactness_to_proto(batch.exactness),
        run_seed=batch.run_seed,
    )
    if batch.deadline is not None:
        request.deadline.FromNanoseconds(round(batch.deadline * 1e9))
    return request


def hint_to_proto(hint: t.BatchHint) -> rollout_pb2.HintNextBatchRequest:
    """The whole hint."""
    return rollout_pb2.HintNextBatchRequest(
        run_id=hint.run_id,
        step=hint.step,
        expected_version=hint.expected_version,
        groups=[group_to_proto(group) for group in hint.groups],
        sampling=sampling_to_proto(hint.sampling),
        exactness=exactness_to_proto(hint.exactness),
        run_seed=hint.run_seed,
    )


def sample_request_to_proto(request: t.SampleRequest) -> rollout_pb2.GenerateRequest:
    """The whole request."""
    return rollout_pb2.GenerateRequest(
        run_id=request.run_id,
        prompt_id=request.prompt_id,
        slot=request.slot,
        step=request.step,
        policy_version=request.policy_version,
        prompt_token_ids=request.prompt_token_ids,
        prefix_token_ids=request.prefix_token_ids,
        sampling=sampling_to_proto(request.sampling),
        exactness=exactness_to_proto(request.exactness),
        run_seed=request.run_seed,
    )


def target_to_proto(target: t.WeightTarget) -> weight_pb2.WeightTarget:
    """Policy or drafter."""
    number: weight_pb2.WeightTarget = _TARGET.number(target)
    return number


def knobs_to_proto(knobs: Any) -> struct_pb2.Struct:
    """A mapping of JSON values."""
    struct = struct_pb2.Struct()
    struct.update(dict(knobs))
    return struct


# What comes back.


def submitted(answer: rollout_pb2.SubmitRolloutsResponse) -> t.Submitted:
    """The answer to a submission."""
    return t.Submitted(answer.batch_id, answer.samples, answer.already_submitted)


def exactness(message: sample_pb2.Exactness) -> t.Exactness:
    """The exactness that a sample has."""
    return t.Exactness(
        level=_LEVEL.member(message.level),
        lenience=message.lenience if message.HasField("lenience") else None,
        reuse_delay=message.reuse_delay,
        kl_target=message.kl_target if message.HasField("kl_target") else None,
        diversity_floor=message.diversity_floor if message.HasField("diversity_floor") else None,
    )


def provenance(message: sample_pb2.Provenance) -> t.Provenance:
    """Where a sample's tokens came from."""
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
            t.InstanceSpan(s.instance_id, s.begin_token, s.end_token, _seconds(s.begin), _seconds(s.end))
            for s in message.instance_spans
        ),
        queue_seconds=message.queue_seconds,
        generation_seconds=message.generation_seconds,
        cached_tokens=message.cached_tokens,
    )


def sample(message: sample_pb2.Sample) -> t.Sample:
    """One response, its tokens as arrays."""
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
    )


def sample_event(answer: rollout_pb2.StreamRolloutsResponse) -> t.SampleEvent:
    """One event of a batch's stream."""
    return t.SampleEvent(answer.cursor, sample(answer.sample), answer.finished, answer.total)


def generate_event(answer: rollout_pb2.GenerateResponse) -> t.TokenDelta | t.Sample:
    """A delta, or the whole sample at the end."""
    if answer.WhichOneof("event") == "sample":
        return sample(answer.sample)
    delta = answer.delta
    return t.TokenDelta(np.array(delta.token_ids, np.int64), np.array(delta.logprobs, np.float32))


def instance_update(message: weight_pb2.InstanceUpdate) -> t.InstanceUpdate:
    """What an update did on one instance."""
    return t.InstanceUpdate(
        instance_id=message.instance_id,
        applied=message.applied,
        version=message.version,
        checksum=message.checksum,
        error=message.error,
        stage_seconds=message.stage_seconds,
        apply_seconds=message.apply_seconds,
        dropped_blocks=message.dropped_blocks,
        acceptance_probe=message.acceptance_probe if message.HasField("acceptance_probe") else None,
    )


def instance_updates(messages: Iterable[weight_pb2.InstanceUpdate]) -> tuple[t.InstanceUpdate, ...]:
    """In the service's order."""
    return tuple(instance_update(message) for message in messages)


def update_started(answer: weight_pb2.StartUpdateResponse) -> t.UpdateStarted:
    """A claimed update."""
    return t.UpdateStarted(answer.update_id, answer.current_version)


def staged(answer: weight_pb2.UpdateWeightsResponse) -> tuple[t.InstanceUpdate, ...]:
    """What staging did on each instance."""
    return instance_updates(answer.instances)


def update_finished(answer: weight_pb2.FinishUpdateResponse) -> t.UpdateFinished:
    """A published update."""
    return t.UpdateFinished(answer.version, instance_updates(answer.instances))


def versions(answer: weight_pb2.GetVersionsResponse) -> t.Versions:
    """The published versions."""
    return t.Versions(
        policy_version=answer.policy_version,
        drafter_version=answer.drafter_version,
        policy_path=answer.policy_path,
        policy_checksum=answer.policy_checksum,
        update_id=answer.update_id,
        instances=instance_updates(answer.instances),
    )


def instance(message: fleet_pb2.Instance) -> t.Instance:
    """One instance with its load."""
    load = message.load
    return t.Instance(
        instance_id=message.instance_id,
        epoch=message.epoch,
        address=message.address,
        state=_STATE.member(message.state),
        policy_version=message.policy_version,
        load=t.InstanceLoad(
            load.running, load.waiting, load.kv_usage, load.step_seconds, load.generated_tokens, load.steps
        ),
        max_running=message.max_running,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        model=message.model,
        device=message.device,
        registered_at=_seconds(message.registered_at),
        metrics_address=message.metrics_address,
    )


def instances(
    answer: fleet_pb2.ListInstancesResponse | fleet_pb2.WatchFleetResponse,
) -> tuple[t.Instance, ...]:
    """The fleet at one moment."""
    return tuple(instance(message) for message in answer.instances)


def _values(struct: struct_pb2.Struct) -> dict[str, Any]:
    """JSON values; a Struct knows floats only, and whole ones are told as integers."""
    found: dict[str, Any] = _whole(json_format.MessageToDict(struct))
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def policy(answer: fleet_pb2.GetPolicyResponse) -> t.Policy:
    """The knobs of a run."""
    return t.Policy(answer.revision, _values(answer.knobs))


def policy_change(answer: fleet_pb2.SetPolicyResponse) -> t.PolicyChange:
    """What became of a change of knobs."""
    return t.PolicyChange(
        answer.revision, tuple(answer.applied_instance_ids), tuple(answer.pending_instance_ids)
    )


def drafter(answer: fleet_pb2.GetDrafterResponse) -> t.Drafter:
    """The drafter that is trained online."""
    return t.Drafter(
        version=answer.version,
        published=_seconds(answer.published),
        path=answer.path,
        updates=answer.updates,
        samples_used=answer.samples_used,
        policy_version=answer.policy_version,
        acceptance_length=answer.acceptance_length,
        candidate_acceptance_length=answer.candidate_acceptance_length,
        rejected_candidates=answer.rejected_candidates,
        roll_backs=answer.roll_backs,
    )


def decision(answer: fleet_pb2.WatchDecisionsResponse) -> t.Decision:
    """One explained decision."""
    details = _values(answer.details)
    return t.Decision(
        _seconds(answer.time), answer.kind, answer.reason, answer.predicted_gain, details, answer.run_id
    )
