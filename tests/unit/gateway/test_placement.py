"""Placement: the longest first, to the least loaded, never beyond the room."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from services.gateway.placement import Slots, Waiting, WaitingQueue, choose

lengths = st.floats(min_value=1, max_value=1e5)
samples = st.lists(st.tuples(st.integers(0, 5), lengths), max_size=40)
rooms = st.lists(st.integers(0, 8), min_size=1, max_size=5)


def _queue(given_samples: list[tuple[int, float]], version: int = 1) -> WaitingQueue[int]:
    queue: WaitingQueue[int] = WaitingQueue()
    for order, (prompt, predicted) in enumerate(given_samples):
        queue.push(Waiting(order, prompt, version, predicted, order))
    return queue


def _fleet(room: list[int], version: int = 1) -> list[Slots]:
    return [Slots(f"i{number}", version, each, 0.0) for number, each in enumerate(room)]


@given(samples, rooms)
def test_what_fits_is_placed_once_and_the_rest_waits(
    waiting: list[tuple[int, float]], room: list[int]
) -> None:
    queue, fleet = _queue(waiting), _fleet(room)
    placed = queue.place(fleet)
    assert len(placed) == min(len(waiting), sum(room))
    refs = [assignment.waiting.ref for assignment in placed]
    assert len(set(refs)) == len(refs)
    assert len(queue) == len(waiting) - len(placed)
    assert all(ref not in queue for ref in refs)
    for slots, had in zip(fleet, room, strict=True):
        given_to = [a for a in placed if a.instance_id == slots.instance_id]
        assert slots.room == had - len(given_to) >= 0
        assert sum(slots.prompts.values()) == len(given_to)


@given(samples, rooms)
def test_the_longest_go_first_and_ties_keep_their_order(
    waiting: list[tuple[int, float]], room: list[int]
) -> None:
    placed = _queue(waiting).place(_fleet(room))
    ranks = [(-a.waiting.predicted, a.waiting.order) for a in placed]
    assert ranks == sorted(ranks)
    if placed and len(placed) < len(waiting):
        left = {order for order in range(len(waiting))} - {a.waiting.ref for a in placed}
        assert min(-waiting[order][1] for order in left) >= ranks[-1][0]


@given(samples, rooms, st.floats(0, 3))
def test_no_instance_is_chosen_that_is_far_more_loaded_than_another(
    waiting: list[tuple[int, float]], room: list[int], slack: float
) -> None:
    fleet = {slots.instance_id: slots for slots in _fleet(room)}
    loads, left = dict.fromkeys(fleet, 0.0), dict(zip(fleet, room, strict=True))
    for assignment in _queue(waiting).place(fleet.values(), slack):
        chosen, predicted = assignment.instance_id, assignment.waiting.predicted
        least = min(loads[name] for name in fleet if left[name] > 0)
        assert loads[chosen] <= least + slack * predicted
        loads[chosen] += predicted
        left[chosen] -= 1


def test_samples_of_a_prompt_share_an_instance_while_the_load_stays_even() -> None:
    queue = _queue([(prompt, 100.0) for prompt in range(4) for _ in range(2)])
    placed = queue.place(_fleet([8, 8]))
    homes: dict[object, set[str]] = {}
    for assignment in placed:
        homes.setdefault(assignment.waiting.prompt, set()).add(assignment.instance_id)
    assert all(len(instances) == 1 for instances in homes.values())
    assert sorted(a.instance_id for a in placed).count("i0") == 4


def test_without_slack_only_load_counts() -> None:
    slots = [Slots("a", 1, 4, 10.0, {"p": 3}), Slots("b", 1, 4, 9.0)]
    waiting = Waiting(0, "p", 1, 5.0, 0)
    assert choose(waiting, slots, slack=0.0).instance_id == "b"
    assert choose(waiting, slots, slack=1.0).instance_id == "a"


def test_an_instance_with_another_version_gets_nothing() -> None:
    queue = _queue([(0, 10.0)] * 3, version=2)
    assert queue.place(_fleet([5, 5], version=1)) == []
    assert len(queue) == 3
    assert len(queue.place([*_fleet([5], version=1), Slots("new", 2, 2, 0.0)])) == 2


def test_a_sample_pushed_again_moves_to_the_place_of_its_new_prediction() -> None:
    queue = _queue([(0, 10.0), (1, 20.0)])
    queue.push(Waiting(0, 0, 1, 30.0, 0))
    assert len(queue) == 2
    assert [a.waiting.ref for a in queue.place(_fleet([5]))] == [0, 1]


def test_a_discarded_sample_is_never_placed() -> None:
    queue = _queue([(0, 10.0), (1, 20.0)])
    assert queue.discard(1)
    assert not queue.discard(1)
    assert [a.waiting.ref for a in queue.place(_fleet([5]))] == [0]


def test_one_that_is_taken_is_taken_once_whoever_waits_before_it() -> None:
    queue = _queue([(0, 10.0), (1, 20.0), (2, 30.0)])
    taken = queue.take(0)
    assert taken is not None
    assert (taken.ref, queue.take(0), len(queue)) == (0, None, 2)
    assert [a.waiting.ref for a in queue.place(_fleet([5]))] == [2, 1]


def test_giving_back_undoes_taking() -> None:
    slots = Slots("a", 1, 2, 0.0)
    slots.take("p", 5.0)
    slots.take("p", 6.0)
    slots.give_back("p", 5.0)
    assert (slots.room, slots.load, slots.prompts) == (1, 6.0, {"p": 1})
    slots.give_back("p", 6.0)
    assert (slots.room, slots.load, slots.prompts) == (2, 0.0, {})
