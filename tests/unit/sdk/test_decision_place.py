"""A watch of decisions that is cut continues at its position."""

from __future__ import annotations

from paceline.calls.fleet import DecisionPlace
from paceline.v1 import fleet_pb2


def answer(seconds: float, reason: str) -> fleet_pb2.WatchDecisionsResponse:
    message = fleet_pb2.WatchDecisionsResponse(kind="toggle", reason=reason, run_id="r")
    message.time.FromNanoseconds(int(seconds * 1e9))
    return message


def test_it_begins_with_new_decisions_unless_a_time_is_given() -> None:
    assert not DecisionPlace("r", None).request().HasField("since")
    request = DecisionPlace("r", 12.5).request()
    assert (request.run_id, request.since.ToNanoseconds()) == ("r", 12_500_000_000)


def test_after_a_cut_each_decision_is_read_once() -> None:
    place = DecisionPlace("", None)
    first, second, third = answer(5.0, "a"), answer(5.0, "b"), answer(5.0, "c")
    assert [taken.reason for each in (first, second) for taken in place.take(each)] == ["a", "b"]
    assert place.request().since.ToNanoseconds() == 5_000_000_000
    # The next stream begins with all decisions of that moment.
    assert [taken.reason for each in (first, second, third) for taken in place.take(each)] == ["c"]
    (later,) = place.take(answer(6.0, "a"))
    assert (later.time, later.run_id) == (6.0, "r")
    assert place.request().since.ToNanoseconds() == 6_000_000_000


def test_a_stream_that_ends_was_cut() -> None:
    assert not DecisionPlace("", None).stream().complete()


def test_a_stream_of_kept_decisions_ends_by_itself() -> None:
    place = DecisionPlace("", None, kept=True)
    assert place.request().kept
    assert place.stream().complete()
