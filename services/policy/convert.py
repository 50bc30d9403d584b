"""Knobs and reports as messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf import json_format, struct_pb2

from paceline.internal.v1 import policy_pb2 as pb
from services.policy.knobs import Setting
from services.policy.ladder import Acceptance
from services.policy.steps import StepKey, StepTotals


def to_struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """JSON values as a Struct."""
    struct = struct_pb2.Struct()
    json_format.ParseDict(dict(values), struct)
    return struct


def from_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """The JSON values of a Struct; every number is a float."""
    values: dict[str, Any] = json_format.MessageToDict(struct)
    return values


def apply_request(
    revision: int, shared: Setting, runs: Mapping[str, Setting], caps: Mapping[str, int], step_time: str
) -> pb.ApplyKnobsRequest:
    """What an instance is sent."""
    request = pb.ApplyKnobsRequest(
        revision=revision, knobs=to_struct(shared), run_caps=dict(caps), step_time=step_time
    )
    for run_id, setting in runs.items():
        request.runs[run_id].CopyFrom(to_struct(setting))
    return request


def tallies(messages: Iterable[pb.StepTally]) -> Iterator[tuple[StepKey, StepTotals]]:
    """The steps of a report."""
    for message in messages:
        drafts = {
            each.drafter: Acceptance(each.verifications, each.drafted, each.accepted)
            for each in message.drafts
        }
        totals = StepTotals(
            Counter(dict(message.reasons)),
            message.planned_tokens,
            message.expected_tokens,
            message.predicted_gain,
            message.predicted_seconds,
            message.measured_seconds,
            drafts,
            message.mode,
        )
        yield (message.run_id, message.step), totals


def tally_message(key: StepKey, totals: StepTotals) -> pb.StepTally:
    """A step as an instance reports it."""
    return pb.StepTally(
        run_id=key[0],
        step=key[1],
        reasons=dict(totals.reasons),
        planned_tokens=totals.planned_tokens,
        expected_tokens=totals.expected_tokens,
        predicted_gain=totals.predicted_gain,
        predicted_seconds=totals.predicted_seconds,
        measured_seconds=totals.measured_seconds,
        drafts=[
            pb.DraftTally(
                drafter=name,
                verifications=each.verifications,
                drafted=each.drafted,
                accepted=each.accepted,
            )
            for name, each in totals.drafts.items()
        ],
        mode=totals.mode,
    )
