"""The position in a batch's stream: events count once, and those of a later protocol are passed over."""

from __future__ import annotations

from paceline.calls.rollouts import BatchPlace
from paceline.v1 import rollout_pb2, sample_pb2


def event(
    cursor: int, prompt: str = "p", slot: int = 0, total: int = 2
) -> rollout_pb2.StreamRolloutsResponse:
    sample = sample_pb2.Sample(prompt_id=prompt, slot=slot)
    return rollout_pb2.StreamRolloutsResponse(cursor=cursor, sample=sample, finished=total, total=total)


def test_an_event_is_read_once_and_moves_the_cursor() -> None:
    place = BatchPlace("r", "b")
    (read,) = place.read(event(70))
    assert (read.sample.prompt_id, place.cursor, place.complete()) == ("p", 70, False)
    assert not list(place.read(event(70)))
    assert not list(place.read(event(7)))


def test_a_sample_that_comes_again_under_a_later_cursor_is_passed_over() -> None:
    place = BatchPlace("r", "b")
    assert list(place.read(event(1)))
    assert not list(place.read(event(5)))
    assert (place.cursor, place.whole()) == (5, False)
    assert list(place.read(event(9, slot=1)))
    assert place.whole()


def test_the_batch_is_complete_when_every_sample_has_come_whatever_the_counts_say() -> None:
    place = BatchPlace("r", "b")
    assert list(place.read(event(40, slot=3)))
    assert not place.complete()
    assert list(place.read(event(90, prompt="q", slot=3)))
    assert place.complete()


def test_from_a_cursor_on_the_gateways_counts_say_whether_it_is_complete() -> None:
    place = BatchPlace("r", "b", 8)
    assert place.complete()
    assert list(place.read(event(9)))
    assert (place.complete(), place.whole()) == (True, False)


def test_an_event_of_an_unknown_kind_only_moves_the_cursor() -> None:
    place = BatchPlace("r", "b")
    assert not list(place.read(rollout_pb2.StreamRolloutsResponse(cursor=1, finished=2, total=2)))
    assert (place.cursor, place.taken, place.complete()) == (1, 0, False)


def several(*cursors: int) -> rollout_pb2.StreamRolloutsResponse:
    """Return one event with samples at these cursors; their slots are the cursors."""
    last = event(cursors[-1], slot=cursors[-1], total=9)
    for cursor in cursors[:-1]:
        last.earlier.add(cursor=cursor, sample=sample_pb2.Sample(prompt_id="p", slot=cursor))
    return last


def test_the_samples_of_one_event_are_read_in_order_and_each_once() -> None:
    place = BatchPlace("r", "b")
    assert place.request().most_samples > 1
    assert [(each.cursor, each.sample.slot) for each in place.read(several(3, 5, 8))] == [
        (3, 3),
        (5, 5),
        (8, 8),
    ]
    assert [each.cursor for each in place.read(several(5, 8, 9))] == [9]
    assert (place.taken, place.cursor) == (4, 9)


def test_a_reader_who_leaves_amid_an_event_goes_on_after_the_last_sample_that_it_took() -> None:
    place = BatchPlace("r", "b")
    events = place.read(several(3, 5, 8))
    next(events)
    del events
    assert (place.request().cursor, place.taken) == (3, 1)
    assert [each.cursor for each in place.read(several(3, 5, 8))] == [5, 8]


def test_an_open_batch_is_whole_when_it_was_closed_and_all_was_read() -> None:
    place = BatchPlace("r", "b", open=True)
    growing = event(1, total=1)
    growing.open = True
    assert list(place.read(growing))
    assert (place.complete(), place.whole()) == (False, False)
    # Closed without another sample: an event of no kind, at the same cursor.
    assert not list(place.read(rollout_pb2.StreamRolloutsResponse(cursor=1, finished=1, total=1)))
    assert (place.complete(), place.whole()) == (True, True)


def test_an_open_batch_without_samples_is_whole_once_it_is_closed() -> None:
    place = BatchPlace("r", "b", open=True)
    assert not list(place.read(rollout_pb2.StreamRolloutsResponse(open=True)))
    assert (place.complete(), place.whole()) == (False, False)
    assert not list(place.read(rollout_pb2.StreamRolloutsResponse()))
    assert (place.complete(), place.whole()) == (True, True)
