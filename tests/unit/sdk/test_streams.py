"""Streams that are opened again: after their time, and after a gateway that sends nothing."""

from __future__ import annotations

import grpc
import pytest

from paceline.blocking import iterate
from paceline.calls import GatewayCalls
from paceline.calls.caller import RetryPolicy
from paceline.calls.rollouts import BatchReading
from paceline.errors import STREAM_SILENT, UnavailableError
from paceline.v1 import fleet_pb2, rollout_pb2, sample_pb2
from tests.unit.sdk.scripted_transport import ScriptedTransport

ONCE = RetryPolicy(seconds=0)
"""The first failure is raised."""
AGAIN = RetryPolicy(seconds=600, initial=1, multiplier=1000, maximum=1000)
"""The second failure is raised: the pause before a third attempt would be too long."""


class TimeUp(grpc.RpcError):
    """End of an attempt whose time is over."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"

    def trailing_metadata(self) -> None:
        return None


NOTHING_YET = rollout_pb2.StreamRolloutsResponse(total=2)
EVENTS = [
    rollout_pb2.StreamRolloutsResponse(
        cursor=number, sample=sample_pb2.Sample(prompt_id="a", slot=number), finished=number, total=2
    )
    for number in (1, 2)
]


def _calls(transport: ScriptedTransport, retry: RetryPolicy) -> GatewayCalls:
    """Return calls each of whose attempts at a stream has no time."""
    return GatewayCalls(transport, retry, stream_seconds=0.0)


def test_a_stream_on_which_nothing_comes_is_a_failure_that_is_retried_and_raised() -> None:
    transport = ScriptedTransport({"StreamRollouts": [[TimeUp()] for _ in range(9)]})
    with pytest.raises(UnavailableError, match="has sent nothing on StreamRollouts") as caught:
        list(iterate(_calls(transport, AGAIN).stream("run", "batch")))
    assert caught.value.reason == STREAM_SILENT
    assert len(transport.made) == 2


def test_a_batch_that_is_worked_on_is_waited_for_without_end() -> None:
    attempts = [[NOTHING_YET, TimeUp()] for _ in range(50)]
    transport = ScriptedTransport({"StreamRollouts": [*attempts, [EVENTS[0], TimeUp()], EVENTS]})
    events = list(iterate(_calls(transport, ONCE).stream("run", "batch")))
    assert [event.sample.slot for event in events] == [1, 2]
    assert len(transport.made) == 52


def test_a_turn_in_which_nothing_comes_is_followed_by_more_time() -> None:
    transport = ScriptedTransport({"StreamRollouts": [[TimeUp()], [NOTHING_YET, TimeUp()]]})
    calls = _calls(transport, AGAIN)
    reading = BatchReading(calls, "run", "batch")
    assert list(iterate(reading.events(reading.read, 1e-9))) == []
    assert transport.seconds == [1e-9, 0.0]


def test_decisions_may_be_far_apart_and_states_of_the_fleet_not() -> None:
    decision = fleet_pb2.WatchDecisionsResponse()
    attempts = [[TimeUp()] for _ in range(50)]
    transport = ScriptedTransport({"WatchDecisions": [*attempts, [decision]], "WatchFleet": [[TimeUp()]]})
    calls = _calls(transport, ONCE)
    assert next(iter(iterate(calls.watch_decisions()))) is not None
    with pytest.raises(UnavailableError, match="WatchFleet"):
        next(iter(iterate(calls.watch_fleet())))
