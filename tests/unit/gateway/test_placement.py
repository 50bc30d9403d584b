"""Placement: to the least loaded, where samples of the prompt are, never beyond the room."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given

from services.gateway.scheduler.placement import (
    MOST_COMPARED,
    InstancePool,
    InstanceSlots,
    Placement,
    WaitingQueue,
    WaitingSample,
)

lengths = st.floats(min_value=1, max_value=1e5)
samples = st.lists(st.tuples(st.integers(0, 5), lengths), max_size=40)
rooms = st.lists(st.integers(0, 8), min_size=1, max_size=5)


def _queue(given_samples: list[tuple[int, float]], version: int = 1) -> WaitingQueue[int]:
    queue: WaitingQueue[int] = WaitingQueue()
    for order, (prompt, predicted) in enumerate(given_samples):
        queue.push(WaitingSample(order, prompt, version, predicted, order))
    return queue


def _fleet(room: list[int], version: int = 1) -> list[InstanceSlots]:
    return [InstanceSlots(f"i{number}", version, each) for number, each in enumerate(room)]


def _pool(fleet: Sequence[InstanceSlots]) -> InstancePool:
    pool = InstancePool()
    for slots in fleet:
        pool.add(slots)
    return pool


def _place(
    queue: WaitingQueue[int], fleet: Sequence[InstanceSlots], slack: float = 1.0
) -> list[Placement[int]]:
    pool = _pool(fleet)
    return list(iter(lambda: queue.place_next(pool, slack), None))


def plain_choice(
    fleet: Sequence[InstanceSlots], version: int, prompt: object, predicted: float, slack: float
) -> InstanceSlots | None:
    """Choose by the rule as it reads, looking at every instance."""
    free = [slots for slots in fleet if slots.room > 0 and slots.policy_version == version]
    if not free:
        return None
    bound = min(slots.load for slots in free) + slack * predicted
    near = [slots for slots in free if slots.load <= bound]
    return min(near, key=lambda s: (-s.prompts.get(prompt, 0), s.load, s.instance_id))


@given(samples, rooms)
def test_what_fits_is_placed_once_and_the_rest_waits(
    waiting: list[tuple[int, float]], room: list[int]
) -> None:
    queue, fleet = _queue(waiting), _fleet(room)
    placed = _place(queue, fleet)
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
    placed = _place(_queue(waiting), _fleet(room))
    ranks = [(-a.waiting.predicted, a.waiting.order) for a in placed]
    assert ranks == sorted(ranks)
    if placed and len(placed) < len(waiting):
        left = {order for order in range(len(waiting))} - {a.waiting.ref for a in placed}
        assert min(-waiting[order][1] for order in left) >= ranks[-1][0]


# What may happen to an instance, by number: it takes a sample of a prompt, a sample leaves, it gets another
# version, is closed or opened, leaves or comes back.
changes = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(("take", "give", "version", "close", "open", "leave", "join")),
        st.integers(0, 3),
        st.sampled_from((1.0, 10.0, 11.0, 250.0)),
    ),
    max_size=60,
)


@given(changes, st.floats(0, 3))
def test_the_instance_chosen_is_that_of_the_plain_rule_whatever_happened_before(
    events: list[tuple[int, str, int, float]], slack: float
) -> None:
    fleet = _fleet([3] * 6)
    closed: set[InstanceSlots] = set()
    pool = InstancePool(lambda slots: slots not in closed)
    for slots in fleet:
        pool.add(slots)
    gone: set[InstanceSlots] = set()
    held: dict[InstanceSlots, list[tuple[int, float]]] = {slots: [] for slots in fleet}
    for number, event, prompt, predicted in events:
        slots = fleet[number]
        if event == "take" and slots.room:
            slots.take(prompt, predicted)
            held[slots].append((prompt, predicted))
        elif event == "give" and held[slots]:
            slots.give_back(*held[slots].pop())
        elif event == "version":
            slots.serve(1 + prompt % 2)
        elif event == "close":
            closed.add(slots)
        elif event == "open":
            closed.discard(slots)
            pool.look_again()
        elif event == "leave":
            gone.add(slots)
            pool.remove(slots)
        elif event == "join":
            gone.discard(slots)
            pool.add(slots)
        there = [each for each in fleet if each not in gone | closed]
        for version in (1, 2):
            expected = plain_choice(there, version, prompt, predicted, slack)
            assert pool.choose(version, prompt, predicted, slack) is expected


@given(st.integers(1, 3 * MOST_COMPARED), st.floats(0, 3))
def test_of_very_many_instances_with_samples_of_the_prompt_one_within_the_bound_is_chosen(
    homes: int, slack: float
) -> None:
    fleet = [InstanceSlots(f"i{number:03}", 1, 8, 0.0) for number in range(3 * MOST_COMPARED)]
    pool = _pool(fleet)
    for number in range(homes):
        fleet[number].take("p", 1.0 + number % 7)
    chosen = pool.choose(1, "p", 3.0, slack)
    assert chosen is not None
    assert chosen.load <= min(slots.load for slots in fleet) + slack * 3.0
    if any(fleet[number].load <= slack * 3.0 for number in range(min(homes, MOST_COMPARED))):
        assert "p" in chosen.prompts


def test_the_pool_does_not_grow_with_the_number_of_changes_or_versions() -> None:
    fleet = _fleet([4, 4])
    pool = _pool(fleet)
    for version in range(1, 50):
        for slots in fleet:
            slots.serve(version)
            for _ in range(100):
                slots.take("p", 5.0)
                slots.give_back("p", 5.0)
    assert sum(map(len, pool._heaps.values())) <= 4 * len(fleet) + 64 + 1
    assert pool._homes == {}


def test_samples_of_a_prompt_share_an_instance_while_the_load_stays_even() -> None:
    queue = _queue([(prompt, 100.0) for prompt in range(4) for _ in range(2)])
    placed = _place(queue, _fleet([8, 8]))
    homes: dict[object, set[str]] = {}
    for assignment in placed:
        homes.setdefault(assignment.waiting.prompt, set()).add(assignment.instance_id)
    assert all(len(instances) == 1 for instances in homes.values())
    assert sorted(a.instance_id for a in placed).count("i0") == 4


def test_without_slack_only_load_counts() -> None:
    pool = _pool([InstanceSlots("a", 1, 4, 10.0, {"p": 3}), InstanceSlots("b", 1, 4, 9.0)])
    chosen = [pool.choose(1, "p", 5.0, slack) for slack in (0.0, 1.0)]
    assert [slots and slots.instance_id for slots in chosen] == ["b", "a"]


def test_an_instance_with_another_version_gets_nothing() -> None:
    queue = _queue([(0, 10.0)] * 3, version=2)
    assert _place(queue, _fleet([5, 5], version=1)) == []
    assert len(queue) == 3
    assert len(_place(queue, [*_fleet([5], version=1), InstanceSlots("new", 2, 2)])) == 2


def test_a_sample_pushed_again_moves_to_the_place_of_its_new_prediction() -> None:
    queue = _queue([(0, 10.0), (1, 20.0)])
    queue.push(WaitingSample(0, 0, 1, 30.0, 0))
    assert len(queue) == 2
    assert [a.waiting.ref for a in _place(queue, _fleet([5]))] == [0, 1]


def test_a_discarded_sample_is_never_placed() -> None:
    queue = _queue([(0, 10.0), (1, 20.0)])
    assert queue.discard(1)
    assert not queue.discard(1)
    assert [a.waiting.ref for a in _place(queue, _fleet([5]))] == [0]


class _Batch:
    """A batch whose samples wait."""


def test_samples_that_continue_under_another_version_leave_nothing_under_the_former_one() -> None:
    queue, slots = WaitingQueue[tuple[_Batch, int]](), InstanceSlots("a", 0, 0)
    pool, former = _pool([slots]), list[weakref.ref[_Batch]]()
    for version in range(5):
        batch = _Batch()
        former.append(weakref.ref(batch))
        for each in (version, version + 1):
            for index in range(100):
                queue.push(WaitingSample((batch, index), "p", each, 5.0, index))
        slots.room = 100
        slots.serve(version + 1)
        assert len(list(iter(lambda: queue.place_next(pool), None))) == 100
        assert len(queue._levels) <= 2
    del batch
    assert [each() for each in former] == [None] * 5


def test_a_discarded_sample_is_not_kept_while_others_wait() -> None:
    queue = WaitingQueue[tuple[_Batch, int]]()
    batch, waiting = _Batch(), _Batch()
    former = weakref.ref(batch)
    for index in range(1000):
        queue.push(WaitingSample((batch, index), "p", 1, 5.0, index, run="a"))
    queue.push(WaitingSample((waiting, 0), "p", 1, 9.0, 0, run="a"))
    for index in range(1000):
        assert queue.discard((batch, index))
    del batch
    assert former() is None
    assert len(queue._levels[1][0].shares["a"].heap) <= 4 + 64
    assert [each.waiting.ref for each in iter(lambda: queue.place_next(_pool(_fleet([1]))), None)] == [
        (waiting, 0)
    ]


def test_one_that_is_taken_is_taken_once_whoever_waits_before_it() -> None:
    queue = _queue([(0, 10.0), (1, 20.0), (2, 30.0)])
    taken = queue.take(0)
    assert taken is not None
    assert (taken.ref, queue.take(0), len(queue)) == (0, None, 2)
    assert [a.waiting.ref for a in _place(queue, _fleet([5]))] == [2, 1]


def test_giving_back_undoes_taking() -> None:
    slots = InstanceSlots("a", 1, 2)
    slots.take("p", 5.0)
    slots.take("p", 6.0)
    slots.give_back("p", 5.0)
    assert (slots.room, slots.load, slots.prompts) == (1, 6.0, {"p": 1})
    slots.give_back("p", 6.0)
    assert (slots.room, slots.load, slots.prompts) == (2, 0.0, {})
