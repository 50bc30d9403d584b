"""Translate between the SDK's records and the protocol's messages. Pure; one module for each service."""

from paceline.convert.fleet import decision, drafter, instance, instances, knob_change, knob_setting
from paceline.convert.rollouts import (
    batch_to_proto,
    exactness,
    exactness_to_proto,
    generate_events,
    group_to_proto,
    hint_to_proto,
    provenance,
    sample,
    sample_request_to_proto,
    sampling_to_proto,
    submitted,
)
from paceline.convert.weights import (
    in_flight_to_proto,
    instance_update,
    instance_updates,
    staged,
    target_to_proto,
    update_finished,
    update_started,
    versions,
)

__all__ = [
    "batch_to_proto",
    "decision",
    "drafter",
    "exactness",
    "exactness_to_proto",
    "generate_events",
    "group_to_proto",
    "hint_to_proto",
    "in_flight_to_proto",
    "instance",
    "instance_update",
    "instance_updates",
    "instances",
    "knob_change",
    "knob_setting",
    "provenance",
    "sample",
    "sample_request_to_proto",
    "sampling_to_proto",
    "staged",
    "submitted",
    "target_to_proto",
    "update_finished",
    "update_started",
    "versions",
]
