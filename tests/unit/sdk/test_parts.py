"""Parts of a batch for which a gateway has no room yet."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

from paceline import Batch, Group
from paceline.batches.parts import BatchPart, parts_of, read_in_turn, submit_all
from paceline.blocking import finish, iterate
from paceline.calls import GatewayCalls
from paceline.v1 import rollout_pb2, sample_pb2
from tests.unit.sdk.scripted_transport import ScriptedFailure, ScriptedTransport

ACCEPTED = rollout_pb2.SubmitRolloutsResponse(samples=1)
NOTHING_YET = rollout_pb2.StreamRolloutsResponse(total=1)
TIME_UP = ScriptedFailure(grpc.StatusCode.DEADLINE_EXCEEDED)
SUBMITTED, READ = "SubmitRollouts", "StreamRollouts"


def full(seconds: int) -> ScriptedFailure:
    """Return the refusal of a gateway that asks for another attempt after some seconds."""
    delay = duration_pb2.Duration(seconds=seconds)
    return ScriptedFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, error_details_pb2.RetryInfo(retry_delay=delay))


def whole(prompt_id: str) -> list[rollout_pb2.StreamRolloutsResponse]:
    """Return the answers of a stream that has the only sample of a part."""
    sample = sample_pb2.Sample(prompt_id=prompt_id)
    return [rollout_pb2.StreamRolloutsResponse(cursor=1, sample=sample, finished=1, total=1)]


def three_parts(transport: ScriptedTransport) -> list[BatchPart]:
    batch = Batch("run", "batch", 0, 0, [Group(f"p{number}", [1], 1) for number in range(3)])
    return [BatchPart(GatewayCalls(transport), part) for part in parts_of(batch, most_samples=1)]


def read(parts: list[BatchPart]) -> list[str]:
    """Submit and read parts; return the prompts of their samples."""
    finish(submit_all(parts))
    return [event.sample.prompt_id for _, event in iterate(read_in_turn(parts))]


def test_with_nothing_to_read_the_next_part_waits_for_room_as_the_gateway_asks() -> None:
    transport = ScriptedTransport(
        {
            SUBMITTED: [ACCEPTED, full(5), full(5), full(5), ACCEPTED, ACCEPTED],
            READ: [whole("p0"), whole("p1"), whole("p2")],
        }
    )
    assert read(three_parts(transport)) == ["p0", "p1", "p2"]
    assert transport.slept == [5, 5], "the first refusal was followed by the reading of a part"


def test_a_part_that_was_refused_is_not_sent_again_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.batches.parts.TURN_SECONDS", 1e-9)
    transport = ScriptedTransport(
        {
            SUBMITTED: [ACCEPTED, full(3600), full(3600), ACCEPTED, ACCEPTED],
            READ: [*([NOTHING_YET, TIME_UP] for _ in range(20)), whole("p0"), whole("p1"), whole("p2")],
        }
    )
    assert read(three_parts(transport)) == ["p0", "p1", "p2"]
    refused = [SUBMITTED, SUBMITTED, READ, SUBMITTED]
    assert transport.made == [*refused, *[READ] * 20, SUBMITTED, READ, SUBMITTED, READ]
