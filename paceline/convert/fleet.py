"""Translate messages about instances, knobs, the drafter and decisions."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format, struct_pb2

from paceline import types as t
from paceline.convert.enums import EnumPair
from paceline.knobs import knobs_from_proto
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2

_STATE = EnumPair(t.InstanceState, fleet_pb2.InstanceState, "INSTANCE_STATE")


def instance(message: fleet_pb2.Instance) -> t.Instance:
    """Return one instance with its load."""
    load = message.load
    return t.Instance(
        instance_id=message.instance_id,
        epoch=message.epoch,
        address=message.address,
        state=_STATE.member(message.state),
        policy_version=message.policy_version,
        load=t.InstanceLoad(
            load.running,
            load.waiting,
            load.kv_usage,
            seconds_of(load.step_time),
            load.generated_tokens,
            load.steps,
        ),
        max_running=message.max_running,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        model=message.model,
        device=message.device,
        registered_at=seconds_of(message.registered_at),
        metrics_address=message.metrics_address,
        refused_features=dict(message.refused_features),
    )


def instances(
    answer: fleet_pb2.ListInstancesResponse | fleet_pb2.WatchFleetResponse,
) -> tuple[t.Instance, ...]:
    """Return the fleet at one moment."""
    return tuple(instance(message) for message in answer.instances)


def _values(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return JSON values. A Struct has only floats; whole ones become integers."""
    found: dict[str, Any] = _whole(json_format.MessageToDict(struct))
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def knob_setting(answer: fleet_pb2.GetKnobsResponse) -> t.KnobSetting:
    """Return the knobs of a scope."""
    effective = tuple(
        t.EffectiveKnobs(knobs_from_proto(each.knobs), tuple(each.instance_ids)) for each in answer.effective
    )
    return t.KnobSetting(
        answer.revision, knobs_from_proto(answer.knobs), effective, tuple(answer.pending_instance_ids)
    )


def knob_change(answer: fleet_pb2.SetKnobsResponse) -> t.KnobChange:
    """Return the outcome of a change of knobs."""
    return t.KnobChange(
        answer.revision, tuple(answer.applied_instance_ids), tuple(answer.pending_instance_ids)
    )


def drafter(answer: fleet_pb2.GetDrafterResponse) -> t.Drafter:
    """Return the drafter that is trained online."""
    return t.Drafter(
        drafter_version=answer.drafter_version,
        published_at=seconds_of(answer.published_at),
        path=answer.path,
        updates=answer.updates,
        samples_used=answer.samples_used,
        policy_version=answer.policy_version,
        acceptance_length=answer.acceptance_length,
        candidate_acceptance_length=answer.candidate_acceptance_length,
        rejected_candidates=answer.rejected_candidates,
        rollbacks=answer.rollbacks,
    )


def decision(answer: fleet_pb2.WatchDecisionsResponse) -> t.Decision:
    """Return one decision with its explanation."""
    details = _values(answer.details)
    return t.Decision(
        seconds_of(answer.time), answer.kind, answer.reason, answer.predicted_gain, details, answer.run_id
    )
