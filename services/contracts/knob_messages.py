"""Conversion of knobs and speculation reports to and from messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.errors import Violation
from paceline.internal.v1 import policy_pb2 as pb
from paceline.knobs import knobs_from_proto, knobs_to_proto
from paceline.times import duration, seconds_of
from paceline.v1 import knobs_pb2
from services.contracts.errors import InvalidArgument
from services.contracts.knobs import Setting
from services.contracts.step_totals import Acceptance, StepKey, StepTotals


def setting_of(message: knobs_pb2.Knobs, field: str = "knobs") -> dict[str, Any]:
    """Return the knobs that a message sets, unchecked.

    Raises:
        InvalidArgument: the message sets knobs that only later versions of this service have. Passing over them
            would report a change as made that was not.
    """
    for part in (message, message.ladder, message.drafters):
        unknown = UnknownFieldSet(part)
        if numbers := [unknown[place].field_number for place in range(len(unknown))]:
            raise InvalidArgument(
                [Violation(field, f"sets knobs that this service does not know (field numbers {numbers})")]
            )
    return knobs_from_proto(message)


def apply_request(
    revision: int, shared: Setting, runs: Mapping[str, Setting], caps: Mapping[str, int]
) -> pb.ApplyKnobsRequest:
    """Return the request that applies knobs on an instance."""
    request = pb.ApplyKnobsRequest(revision=revision, knobs=knobs_to_proto(shared), run_caps=dict(caps))
    for run_id, setting in runs.items():
        request.runs[run_id].CopyFrom(knobs_to_proto(setting))
    return request


def tallies(messages: Iterable[pb.StepTally]) -> Iterator[tuple[StepKey, StepTotals]]:
    """Yield the steps of a report with their totals."""
    for message in messages:
        drafts = {
            each.drafter: Acceptance(
                each.verifications,
                each.drafted,
                each.accepted,
                tuple(each.drafted_lengths),
                tuple(each.accepted_lengths),
            )
            for each in message.drafts
        }
        totals = StepTotals(
            Counter(dict(message.reasons)),
            message.planned_tokens,
            message.expected_tokens,
            message.predicted_gain,
            seconds_of(message.predicted_time),
            seconds_of(message.measured_time),
            drafts,
            message.mode,
        )
        yield (message.run_id, message.step), totals


def tally_message(key: StepKey, totals: StepTotals) -> pb.StepTally:
    """Return the message of a step's totals."""
    return pb.StepTally(
        run_id=key[0],
        step=key[1],
        reasons=dict(totals.reasons),
        planned_tokens=totals.planned_tokens,
        expected_tokens=totals.expected_tokens,
        predicted_gain=totals.predicted_gain,
        predicted_time=duration(totals.predicted_seconds),
        measured_time=duration(totals.measured_seconds),
        drafts=[
            pb.DraftTally(drafter=name, **asdict(acceptance)) for name, acceptance in totals.drafts.items()
        ],
        mode=totals.mode,
    )
