"""The reading of a batch's stream: events count once, and events of a later protocol are skipped."""

from __future__ import annotations

import pytest

from paceline import Sample, convert
from paceline.batches.parts import BatchPart
from paceline.calls.rollouts import BatchReading, RolloutCalls
from paceline.types import Batch
from paceline.v1 import rollout_pb2, sample_pb2
from tests.unit.sdk.scripted_transport import ScriptedTransport

CALLS = RolloutCalls(ScriptedTransport({}))


def event(
    cursor: int, prompt: str = "p", slot: int = 0, total: int = 2
) -> rollout_pb2.StreamRolloutsResponse:
    sample = sample_pb2.Sample(prompt_id=prompt, slot=slot)
    return rollout_pb2.StreamRolloutsResponse(cursor=cursor, sample=sample, finished=total, total=total)


def test_an_event_is_read_once_and_moves_the_cursor() -> None:
    reading = BatchReading(CALLS, "r", "b")
    (read,) = reading.read(event(70))
    assert (read.sample.prompt_id, reading.cursor, reading.complete()) == ("p", 70, False)
    assert not list(reading.read(event(70)))
    assert not list(reading.read(event(7)))


def test_a_sample_that_comes_again_under_a_later_cursor_is_skipped() -> None:
    reading = BatchReading(CALLS, "r", "b")
    assert list(reading.read(event(1)))
    assert not list(reading.read(event(5)))
    assert (reading.cursor, reading.whole()) == (5, False)
    assert list(reading.read(event(9, slot=1)))
    assert reading.whole()


def test_the_batch_is_complete_when_every_sample_has_come_whatever_the_counts_say() -> None:
    reading = BatchReading(CALLS, "r", "b")
    assert list(reading.read(event(40, slot=3)))
    assert not reading.complete()
    assert list(reading.read(event(90, prompt="q", slot=3)))
    assert reading.complete()


def test_from_a_cursor_on_the_gateways_counts_say_whether_it_is_complete() -> None:
    reading = BatchReading(CALLS, "r", "b", 8)
    assert reading.complete()
    assert list(reading.read(event(9)))
    assert (reading.complete(), reading.whole()) == (True, False)


def test_a_sample_that_is_being_read_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    part, made, seen = BatchPart(CALLS, Batch("r", "b", 1, 0, [])), convert.sample, list[int]()

    def while_it_is_read(message: sample_pb2.Sample) -> Sample:
        seen.append(part.given)
        return made(message)

    monkeypatch.setattr(convert, "sample", while_it_is_read)
    for each in part.read(several(3, 5)):
        part.give(each)
    assert (seen, part.given) == ([0, 3], 5)


def test_an_event_of_an_unknown_kind_only_moves_the_cursor() -> None:
    reading = BatchReading(CALLS, "r", "b")
    assert not list(reading.read(rollout_pb2.StreamRolloutsResponse(cursor=1, finished=2, total=2)))
    assert (reading.cursor, reading.taken, reading.complete()) == (1, 0, False)


def several(*cursors: int) -> rollout_pb2.StreamRolloutsResponse:
    """Return one event with samples at these cursors; their slots are the cursors."""
    last = event(cursors[-1], slot=cursors[-1], total=9)
    for cursor in cursors[:-1]:
        last.earlier.add(cursor=cursor, sample=sample_pb2.Sample(prompt_id="p", slot=cursor))
    return last


def test_the_samples_of_one_event_are_read_in_order_and_each_once() -> None:
    reading = BatchReading(CALLS, "r", "b")
    assert reading.request().most_samples > 1
    assert [(each.cursor, each.sample.slot) for each in reading.read(several(3, 5, 8))] == [
        (3, 3),
        (5, 5),
        (8, 8),
    ]
    assert [each.cursor for each in reading.read(several(5, 8, 9))] == [9]
    assert (reading.taken, reading.cursor) == (4, 9)


def test_a_reader_who_leaves_amid_an_event_continues_after_the_last_sample_that_it_took() -> None:
    reading = BatchReading(CALLS, "r", "b")
    events = reading.read(several(3, 5, 8))
    next(events)
    del events
    assert (reading.request().cursor, reading.taken) == (3, 1)
    assert [each.cursor for each in reading.read(several(3, 5, 8))] == [5, 8]


def test_an_open_batch_is_whole_when_it_was_closed_and_all_was_read() -> None:
    reading = BatchReading(CALLS, "r", "b", open=True)
    growing = event(1, total=1)
    growing.open = True
    assert list(reading.read(growing))
    assert (reading.complete(), reading.whole()) == (False, False)
    # Closed without another sample: an event of no kind, at the same cursor.
    assert not list(reading.read(rollout_pb2.StreamRolloutsResponse(cursor=1, finished=1, total=1)))
    assert (reading.complete(), reading.whole()) == (True, True)


def test_an_open_batch_without_samples_is_whole_once_it_is_closed() -> None:
    reading = BatchReading(CALLS, "r", "b", open=True)
    assert not list(reading.read(rollout_pb2.StreamRolloutsResponse(open=True)))
    assert (reading.complete(), reading.whole()) == (False, False)
    assert not list(reading.read(rollout_pb2.StreamRolloutsResponse()))
    assert (reading.complete(), reading.whole()) == (True, True)
