"""Translate messages about instances, weight updates, knobs, the drafter and decisions.

A setting of knobs names only the knobs that it sets: `{"mode": "toggle", "ladder": {"on": True}}`. The service
checks the values; names and types that do not fit into a message are refused here, in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import json_format, struct_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline import types as t
from paceline.convert.values import EnumPair
from paceline.errors import invalid_argument
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2, knobs_pb2, weight_pb2

Faults = dict[str, str]
"""Descriptions of wrong fields, by dotted name."""
_STATE = EnumPair(t.InstanceState, fleet_pb2.InstanceState, "INSTANCE_STATE")
_TARGET = EnumPair(t.WeightTarget, weight_pb2.WeightTarget, "WEIGHT_TARGET")
_IN_FLIGHT = EnumPair(t.InFlight, weight_pb2.InFlight, "IN_FLIGHT")
# Field with all drafters that have no other field. In a mapping they are like the others.
_OTHERS = "others"


def knobs_to_proto(knobs: Mapping[str, Any]) -> knobs_pb2.Knobs:
    """Return the knobs as a message; knobs that the mapping does not name stay unset.

    Raises:
        InvalidArgumentError: there is no knob of a name, or a value is not of its knob's type; see `violations`.
    """
    message = knobs_pb2.Knobs()
    if not isinstance(knobs, Mapping):
        raise invalid_argument(
            {"knobs": f"is a {type(knobs).__name__}; must be a mapping of names to values"}
        )
    faults: Faults = {}
    _fill(message, knobs, "knobs", faults)
    if faults:
        raise invalid_argument(faults)
    return message


def knobs_from_proto(message: knobs_pb2.Knobs) -> dict[str, Any]:
    """Return the knobs that are set, by name."""
    values: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if "drafters" in values:
        values["drafters"] |= values["drafters"].pop(_OTHERS, {})
    return values


def _fill(message: Message, values: Mapping[str, Any], path: str, faults: Faults) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in values.items():
        place = f"{path}.{name}"
        field = None if name == _OTHERS else fields.get(name)
        if field is None and _OTHERS in fields:
            # A drafter without its own field. The service knows whether there is one of this name.
            if isinstance(name, str) and isinstance(value, bool):
                getattr(message, _OTHERS)[name] = value
            else:
                faults[place] = f"is {value!r}; must be true or false"
        elif field is None:
            faults[place] = f"is no knob; there are {', '.join(fields)}"
        elif field.message_type is not None and isinstance(value, Mapping):
            group: Message = getattr(message, name)
            group.SetInParent()
            _fill(group, value, place, faults)
        elif isinstance(value, list | tuple) and not value:
            faults[place] = "is empty; leave it out to unset it"
        else:
            try:
                values_by_name = {name: list(value) if isinstance(value, tuple) else value}
                json_format.ParseDict(values_by_name, message)
            except json_format.ParseError:
                faults[place] = f"is {value!r}; must be {_allowed(field)}"


def _allowed(field: Any) -> str:
    """Return in words what a knob takes; the service checks ranges, and the names of modes."""
    if field.message_type is not None:
        return f"a group of knobs: {', '.join(field.message_type.fields_by_name)}"
    one, several = {
        FieldDescriptor.CPPTYPE_BOOL: ("true or false", "truth values"),
        FieldDescriptor.CPPTYPE_STRING: ("a text", "texts"),
        FieldDescriptor.CPPTYPE_DOUBLE: ("a finite number", "finite numbers"),
    }.get(field.cpp_type, ("a whole number", "whole numbers"))
    return f"a list of {several}" if field.is_repeated else one


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
        keeps_kv=message.keeps_kv,
    )


def instances(
    answer: fleet_pb2.ListInstancesResponse | fleet_pb2.WatchFleetResponse,
) -> tuple[t.Instance, ...]:
    """Return the instances of an answer."""
    return tuple(instance(message) for message in answer.instances)


def _values(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return the values of a Struct, which has only floats: whole numbers become integers."""
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


def target_to_proto(target: t.WeightTarget) -> weight_pb2.WeightTarget:
    """Return the number of a target."""
    number: weight_pb2.WeightTarget = _TARGET.number(target, "target")
    return number


def in_flight_to_proto(treatment: t.InFlight) -> weight_pb2.InFlight:
    """Return the number of a treatment of unfinished samples."""
    number: weight_pb2.InFlight = _IN_FLIGHT.number(treatment, "in_flight")
    return number


def instance_updates(messages: Iterable[weight_pb2.InstanceUpdate]) -> tuple[t.InstanceUpdate, ...]:
    """Return the outcomes of an update on all instances, in the service's order."""
    return tuple(
        t.InstanceUpdate(
            instance_id=each.instance_id,
            applied=each.applied,
            policy_version=each.policy_version,
            checksum=each.checksum,
            error=each.error,
            stage_seconds=seconds_of(each.stage_time),
            apply_seconds=seconds_of(each.apply_time),
            dropped_blocks=each.dropped_blocks,
            kept_samples=each.kept_samples,
        )
        for each in messages
    )


def update_started(answer: weight_pb2.StartUpdateResponse) -> t.UpdateStarted:
    """Return a claimed update."""
    return t.UpdateStarted(answer.update_id, answer.policy_version)


def stream_started(answer: weight_pb2.StartUpdateResponse, version: int) -> t.StreamStarted:
    """Return a claimed update and the instance to push to."""
    to = answer.stream
    return t.StreamStarted(answer.update_id, version, to.instance_id, to.address, to.ticket)


def staged(answer: weight_pb2.UpdateWeightsResponse) -> tuple[t.InstanceUpdate, ...]:
    """Return the outcome of staging on each instance."""
    return instance_updates(answer.instances)


def update_finished(answer: weight_pb2.FinishUpdateResponse) -> t.UpdateFinished:
    """Return a published update."""
    return t.UpdateFinished(
        answer.policy_version,
        answer.drafter_version,
        instance_updates(answer.instances),
        answer.aborted_samples,
        answer.continued_samples,
    )


def versions(answer: weight_pb2.GetVersionsResponse) -> t.Versions:
    """Return the published versions."""
    return t.Versions(
        policy_version=answer.policy_version,
        drafter_version=answer.drafter_version,
        policy_path=answer.policy_path,
        policy_checksum=answer.policy_checksum,
        update_id=answer.update_id,
        instances=instance_updates(answer.instances),
    )
