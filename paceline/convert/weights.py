"""Translate the messages of weight updates."""

from __future__ import annotations

from collections.abc import Iterable

from paceline import types as t
from paceline.convert.enums import EnumPair
from paceline.times import seconds_of
from paceline.v1 import weight_pb2

_TARGET = EnumPair(t.WeightTarget, weight_pb2.WeightTarget, "WEIGHT_TARGET")
_IN_FLIGHT = EnumPair(t.InFlight, weight_pb2.InFlight, "IN_FLIGHT")


def target_to_proto(target: t.WeightTarget) -> weight_pb2.WeightTarget:
    """Return the number of a target."""
    number: weight_pb2.WeightTarget = _TARGET.number(target, "target")
    return number


def in_flight_to_proto(treatment: t.InFlight) -> weight_pb2.InFlight:
    """Return the number of a treatment of samples in flight."""
    number: weight_pb2.InFlight = _IN_FLIGHT.number(treatment, "in_flight")
    return number


def instance_update(message: weight_pb2.InstanceUpdate) -> t.InstanceUpdate:
    """Return the outcome of an update on one instance."""
    return t.InstanceUpdate(
        instance_id=message.instance_id,
        applied=message.applied,
        policy_version=message.policy_version,
        checksum=message.checksum,
        error=message.error,
        stage_seconds=seconds_of(message.stage_time),
        apply_seconds=seconds_of(message.apply_time),
        dropped_blocks=message.dropped_blocks,
    )


def instance_updates(messages: Iterable[weight_pb2.InstanceUpdate]) -> tuple[t.InstanceUpdate, ...]:
    """Return the outcomes on all instances, in the service's order."""
    return tuple(instance_update(message) for message in messages)


def update_started(answer: weight_pb2.StartUpdateResponse) -> t.UpdateStarted:
    """Return a claimed update."""
    return t.UpdateStarted(answer.update_id, answer.policy_version)


def stream_started(answer: weight_pb2.StartUpdateResponse, version: int) -> t.StreamStarted:
    """Return a claimed update and the instance to push to."""
    to = answer.stream
    return t.StreamStarted(answer.update_id, version, to.instance_id, to.address, to.ticket)


def collective_started(answer: weight_pb2.StartUpdateResponse, version: int) -> t.CollectiveStarted:
    """Return a claimed update and the instances that take part."""
    return t.CollectiveStarted(answer.update_id, version, tuple(answer.collective.instance_ids))


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
