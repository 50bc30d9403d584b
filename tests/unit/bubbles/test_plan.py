"""Who gets items, who is told to stop, and what becomes of leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.config import BubblesConfig
from services.bubbles.ledger import FORGET, BubbleLedger, TaskLease
from services.bubbles.plan import RUN_SILENCE, PregenerationPlan, WorkAnswer, share_out
from tests.unit.bubbles.hints import hint, named, progress_of, run_status, work_poll

ROLLOUT = run_status(pb.RUN_PHASE_ROLLOUT, 0, 0, unfinished=3)


class World:
    """A plan with one run that has one hint, and a clock."""

    def __init__(
        self, groups: int = 4, slots: int = 2, status: pb.SetRunRequest = ROLLOUT, **rules: Any
    ) -> None:
        self.now = 1000.0
        self.ledger = BubbleLedger(BubblesConfig(**{"lease_seconds": 10.0, **rules}))
        self.plan = PregenerationPlan(self.ledger)
        self.hints: dict[str, list[str]] = {}
        self.tell(status)
        self.hint(groups, slots)

    def hint(self, groups: int, slots: int = 2, step: int = 1, run_id: str = "run") -> None:
        request = hint({f"p{n}": 100.0 for n in range(groups)}, slots=slots, step=step, run_id=run_id)
        self.hints.setdefault(run_id, []).append(request.hint_id)
        self.ledger.put_hint(request, self.now)

    def tell(self, status: pb.SetRunRequest, run_id: str = "run") -> list[str]:
        return self.ledger.set_run(named(status, run_id, self.hints.get(run_id, ())), self.now)

    def poll(
        self, who: str = "a", room: int = 100, *progress: pb.PregenerationProgress, **fields: Any
    ) -> WorkAnswer:
        poll = work_poll(
            who, fields.pop("epoch", 1), fields.pop("policy_version", 0), room, tuple(progress), **fields
        )
        self.ledger.report(poll, self.now)
        return self.plan.answer(poll, self.now)

    def covered(self, step: int = 1) -> dict[tuple[str, int], tuple[int, bool]]:
        return {item.key: (item.covered, item.finished) for item in self.ledger.coverage("run", step)}


def runs(leases: Sequence[TaskLease], tokens: int = 0) -> list[pb.PregenerationProgress]:
    return [progress_of(lease.number, tokens) for lease in leases]


def test_an_idle_instance_gets_all_that_it_has_room_for() -> None:
    world = World()
    first = world.poll("a", 5)
    assert len(first.leases) == 5
    again = world.poll("a", 100, *runs(first.leases))
    assert len(again.leases) == 3
    assert not world.poll("a", 100, *runs([*first.leases, *again.leases])).leases


@pytest.mark.parametrize(
    "status",
    [
        run_status(pb.RUN_PHASE_ROLLOUT, 0, 0, unfinished=3, waiting=1),
        run_status(pb.RUN_PHASE_ROLLOUT, 1, 0),
        run_status(pb.RUN_PHASE_APPLYING, 0, 0),
        run_status(pb.RUN_PHASE_ROLLOUT, 0, 1),
        run_status(pb.RUN_PHASE_ROLLOUT, 0, 2),
    ],
    ids=["a sample waits", "another version", "weights are applied", "the step has begun", "it has passed"],
)
def test_nothing_is_given_out_when(status: pb.SetRunRequest) -> None:
    world = World(status=status)
    assert not world.poll().leases


def test_nothing_is_given_to_an_instance_that_serves_the_step() -> None:
    world = World()
    world.ledger.set_alive({"a": 1})
    assert not world.poll(serving=True).leases
    assert world.poll().leases


def test_beside_few_samples_of_the_step_only_where_that_is_wanted() -> None:
    world = World(intra_instance=True, intra_threshold=8)
    assert not world.poll(serving=True).leases
    world.ledger.set_alive({"a": 9})
    assert not world.poll(serving=True).leases
    world.ledger.set_alive({"a": 8})
    assert world.poll(serving=True).leases


def test_a_sample_of_any_run_that_waits_comes_first_as_long_as_its_gateway_lives() -> None:
    world = World()
    world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 0, 0, unfinished=1, waiting=1), "other")
    assert not world.poll().leases
    world.now += RUN_SILENCE + 1
    world.tell(ROLLOUT)
    assert world.poll().leases


def test_nothing_is_given_out_of_a_run_whose_gateway_is_silent() -> None:
    world = World()
    world.now += RUN_SILENCE + 1
    assert not world.poll().leases


def test_items_are_spread_over_the_instances() -> None:
    world = World(groups=4, slots=2)
    world.ledger.set_alive({"a": 0, "b": 0, "c": 3})
    a, b = world.poll("a"), world.poll("b")
    assert (len(a.leases), len(b.leases)) == (3, 3)
    assert len(world.poll("c").leases) == 2
    done = [progress_of(lease.number, 10, finished=True) for lease in a.leases]
    assert not world.poll("a", 100, *done).leases


def test_what_an_early_instance_has_finished_makes_room_for_more() -> None:
    world = World(groups=4, slots=2)
    world.ledger.set_alive({"a": 0, "b": 5})
    first = world.poll("a").leases
    assert len(first) == 4
    done = [progress_of(lease.number, 10, finished=True) for lease in first]
    assert len(world.poll("a", 100, *done).leases) == 2


def test_nearest_step_first_and_the_next_only_when_nothing_of_it_is_left() -> None:
    world = World(groups=1, slots=2)
    world.hint(groups=1, slots=2, step=2)
    world.hint(groups=1, slots=2, step=3)
    world.ledger.set_alive({"a": 0, "b": 0})
    (a,) = world.poll("a").leases
    assert a.step == 1
    assert not world.poll("a", 100, *runs([a])).leases
    (b,) = world.poll("b").leases
    assert b.step == 1
    assert not world.poll("a", 100, *runs([a])).leases, "a larger batch would slow its nearer item down"
    (later,) = world.poll("a", 100, progress_of(a.number, 9, finished=True)).leases
    assert later.step == 2
    world.poll("b", 100, progress_of(b.number, 9, finished=True))
    assert {lease.step for lease in world.poll("c").leases} <= {2}


def test_no_further_ahead_than_allowed() -> None:
    world = World(groups=1, slots=1, max_ahead=2)
    for step in (2, 3):
        world.hint(groups=1, slots=1, step=step)
    steps, progress = [], []
    for _ in range(4):
        answer = world.poll("a", 100, *progress)
        steps += [lease.step for lease in answer.leases]
        progress = [progress_of(lease.number, 9, finished=True) for lease in answer.leases]
    assert steps == [1, 2]


def test_runs_share_the_room() -> None:
    world = World(groups=8, slots=2)
    world.tell(ROLLOUT, "other")
    world.hint(groups=8, slots=2, run_id="other")
    answer = world.poll("a", 6)
    assert Counter(lease.run_id for lease in answer.leases) == {"run": 3, "other": 3}
    world.tell(ROLLOUT, "third")
    world.hint(groups=8, slots=2, run_id="third")
    more = world.poll("a", 3, *runs(answer.leases)).leases
    assert Counter(lease.run_id for lease in more) == {"third": 3}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6), st.integers(0, 60))
def test_room_goes_to_whoever_has_least(claims: list[tuple[int, int]], room: int) -> None:
    counts = share_out(claims, room)
    assert sum(counts) == min(room, sum(most for _, most in claims))
    assert all(count <= most for count, (_, most) in zip(counts, claims, strict=True))
    for count, (held, _) in zip(counts, claims, strict=True):
        for other, (has, most) in zip(counts, claims, strict=True):
            if count and other < most:
                assert held + count <= has + other + 1


def test_the_update_is_used_unless_instances_are_to_halt_or_sleep() -> None:
    learning = run_status(pb.RUN_PHASE_UPDATE, 0, 0)
    for mode, halt, sleep in (("pregenerate", False, False), ("halt", True, False), ("sleep", True, True)):
        world = World(during_update=mode)
        leases = world.poll().leases
        world.now += 5
        world.tell(learning)
        answer = world.poll("a", 0, *runs(leases, 3))
        assert (answer.halt, answer.sleep, answer.quiet) == (halt, sleep, not halt), mode
        assert answer.halted_at == (world.now if halt else 0.0)
        world.poll("a", 0, *[progress_of(lease.number, 3, returned=True) for lease in leases])
        assert bool(world.poll("b").leases) is (mode == "pregenerate")


@pytest.mark.parametrize("mode", ["halt", "sleep"])
def test_only_bubbles_of_a_step_are_filled_where_updates_are_not_used(mode: str) -> None:
    world = World(status=run_status(pb.RUN_PHASE_ROLLOUT, 0, 0), during_update=mode)
    answer = world.poll()
    assert (answer.leases, answer.halt, answer.sleep) == ((), False, False)
    world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 0, 0, unfinished=1), "other")
    assert len(world.poll().leases) == 8


def test_everybody_halts_while_weights_are_applied() -> None:
    world = World()
    leases = world.poll().leases
    world.tell(run_status(pb.RUN_PHASE_APPLYING, 0, 0))
    answer = world.poll("a", 9, *runs(leases))
    assert (answer.halt, answer.sleep, answer.halted_at) == (True, False, 0.0)
    assert not answer.leases
    world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 1, 0))
    returned = [progress_of(lease.number, 3, returned=True) for lease in leases]
    answer = world.poll("a", 9, *returned, policy_version=1)
    assert (answer.halt, len(answer.leases)) == (False, 8)


def test_weights_that_are_applied_stop_the_items_of_every_run() -> None:
    world = World()
    world.tell(ROLLOUT, "other")
    world.hint(groups=1, run_id="other")
    world.tell(run_status(pb.RUN_PHASE_APPLYING, 0, 0))
    answer = world.poll()
    assert (answer.halt, answer.leases) == (True, ())


def test_the_barrier_is_not_there_while_another_run_has_samples() -> None:
    world = World(groups=1, slots=1, during_update="sleep")
    world.tell(ROLLOUT, "other")
    world.hint(groups=1, slots=1, run_id="other")
    mine, other = sorted(world.poll().leases, key=lambda lease: lease.run_id, reverse=True)
    world.tell(run_status(pb.RUN_PHASE_UPDATE, 0, 0))
    answer = world.poll("a", 9, *runs([mine, other]))
    assert (answer.halt, answer.sleep, answer.revoked) == (False, False, (mine.number,))
    world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 0, 0), "other")
    assert world.poll("a", 9, *runs([other])).sleep


def test_the_end_of_a_step_that_was_not_seen_is_not_made_up() -> None:
    world = World(status=run_status(pb.RUN_PHASE_UPDATE, 0, 0), during_update="halt")
    answer = world.poll()
    assert (answer.halt, answer.halted_at) == (True, 0.0)


def test_an_answer_is_quiet_once_it_has_been_told() -> None:
    world = World(during_update="halt")
    leases = world.poll().leases
    world.tell(run_status(pb.RUN_PHASE_UPDATE, 0, 0))
    assert not world.poll("a", 0, *runs(leases)).quiet
    assert world.poll("a", 9).quiet
    world.tell(ROLLOUT)
    assert not world.poll("a", 0).quiet
    assert world.poll("a", 0).quiet


def test_a_step_that_begins_revokes_its_leases_and_its_coverage_stays() -> None:
    world = World()
    leases = world.poll("a", 2).leases
    world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 0, 1, unfinished=8))
    assert set(world.poll("a", 9, *runs(leases, 5)).revoked) == {lease.number for lease in leases}
    assert world.covered() == {lease.task.key: (5, False) for lease in leases}
    world.poll("a", 9, progress_of(leases[0].number, 6, returned=True))
    assert world.covered() == {leases[0].task.key: (6, False), leases[1].task.key: (5, False)}
    assert not world.poll("b").leases
    world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 0, 2))
    assert world.covered() == {}


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_leases_of_what_is_not_wanted_any_more_are_revoked(how: str) -> None:
    world = World()
    leases = world.poll("a", 2).leases
    if how == "closed":
        world.ledger.close_run("run")
    else:
        world.hints.clear()
        world.tell(ROLLOUT)
    answer = world.poll("a", 9, *runs(leases))
    assert set(answer.revoked) == {lease.number for lease in leases}
    assert not answer.leases


def test_a_returned_item_goes_to_another_with_its_progress_known() -> None:
    world = World(groups=1, slots=1)
    (lease,) = world.poll("a").leases
    assert not world.poll("b").leases
    world.poll("a", 0, progress_of(lease.number, 12, returned=True))
    (again,) = world.poll("b").leases
    assert again.task is lease.task
    assert again.number != lease.number
    assert world.covered() == {("p0", 0): (12, False)}
    world.poll("b", 0, progress_of(again.number, 20, finished=True))
    assert world.covered() == {("p0", 0): (20, True)}
    assert not world.poll("c").leases


def test_an_answer_that_was_lost_costs_nothing() -> None:
    world = World(groups=1, slots=1)
    (lost,) = world.poll("a").leases
    (again,) = world.poll("a").leases
    assert again.number != lost.number
    assert world.ledger.tally["unknown"] == 1


def test_leases_of_a_silent_instance_go_to_others_and_what_it_says_later_is_heard() -> None:
    world = World(groups=1, slots=2, lease_seconds=5.0)
    one, two = world.poll("a").leases
    world.poll("a", 0, *runs([one, two], 7))
    assert world.covered() == {("p0", 0): (7, False), ("p0", 1): (7, False)}
    world.now += 5.1
    world.ledger.expire(world.now)
    assert world.covered() == {}, "its tokens are with it"
    world.tell(ROLLOUT)
    assert {lease.task for lease in world.poll("b").leases} == {one.task, two.task}
    answer = world.poll("a", 9, progress_of(one.number, 9, finished=True), progress_of(two.number, 8))
    assert answer.revoked == (two.number,)
    assert world.covered()["p0", 0] == (9, True)


def test_an_instance_whose_heartbeat_ends_loses_its_leases_at_once() -> None:
    world = World(groups=1, slots=2)
    world.ledger.set_alive({"a": 0, "b": 0})
    (lease,) = world.poll("a").leases
    world.ledger.set_alive({"a": 0})
    world.ledger.set_alive({"a": 3})
    assert not world.poll("a", 9, *runs([lease])).revoked
    world.ledger.set_alive({})
    assert {each.task.key for each in world.poll("b").leases} == {("p0", 0)}, "the other half is a's share"
    assert world.poll("a", 9, *runs([lease])).revoked == (lease.number,)


def test_what_a_late_instance_says_takes_nothing_from_its_successor() -> None:
    world = World(groups=1, slots=2)
    one, two = world.poll("a").leases
    world.now += 11
    world.ledger.expire(world.now)
    world.tell(ROLLOUT)
    theirs = world.poll("b").leases
    world.ledger.expire(world.now)
    world.poll("a", 0, progress_of(one.number, 5, returned=True), progress_of(two.number, 6))
    assert world.covered() == {one.task.key: (5, False)}
    answer = world.poll("b", 9, *runs(theirs, 2))
    assert (answer.revoked, answer.leases) == ((), ())
    assert not world.poll("c").leases


def test_an_item_that_a_late_instance_finished_is_taken_from_its_successor() -> None:
    world = World(groups=1, slots=1)
    (lease,) = world.poll("a").leases
    world.now += 11
    world.ledger.expire(world.now)
    world.tell(ROLLOUT)
    (second,) = world.poll("b").leases
    world.poll("a", 9, progress_of(lease.number, 9, finished=True))
    answer = world.poll("b", 9, *runs([second], 2))
    assert (answer.revoked, answer.leases) == ((second.number,), ())


def test_a_new_process_of_an_instance_voids_the_leases_of_the_old_one() -> None:
    world = World(groups=1, slots=1)
    (lease,) = world.poll("a", epoch=1).leases
    (again,) = world.poll("a", epoch=2).leases
    assert again.task is lease.task
    zombie = world.poll("a", 9, *runs([lease]), epoch=1)
    assert (zombie.revoked, zombie.leases) == ((lease.number,), ())
    assert world.ledger.instances["a"].leases.keys() == {again.number}


def test_a_coordinator_that_knows_nothing_asks_for_hints_and_stops_nobody() -> None:
    world = World()
    leases = world.poll("a", 2).leases
    world.ledger = BubbleLedger(BubblesConfig(), first_lease=1_000_000)
    world.plan = PregenerationPlan(world.ledger)
    answer = world.poll("a", 9)
    assert (answer.halt, answer.revoked, answer.leases) == (False, (), ())
    assert world.tell(ROLLOUT) == ["run-1"]
    world.hint(4)
    assert world.tell(ROLLOUT) == []
    given_now = world.poll("a", 9).leases
    assert {lease.task.key for lease in leases} <= {lease.task.key for lease in given_now}


def test_a_hint_for_a_step_that_has_begun_is_not_taken() -> None:
    world = World(status=run_status(pb.RUN_PHASE_ROLLOUT, 0, 5))
    assert world.ledger.put_hint(hint({"p": 1.0}, step=5), world.now) == 0
    assert world.ledger.put_hint(hint({"p": 1.0}, step=6), world.now) == 2


def test_a_step_that_is_done_again_can_be_hinted_again() -> None:
    world = World()
    world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 0, 1))
    assert not world.poll().leases
    assert world.tell(run_status(pb.RUN_PHASE_ROLLOUT, 0, 0)) == ["run-1"]
    world.hint(4)
    assert len(world.poll().leases) == 8


def test_a_repeated_hint_changes_nothing() -> None:
    world = World()
    leases = world.poll("a", 3).leases
    before = world.ledger.revision
    world.hint(4)
    assert world.ledger.revision == before
    assert not world.poll("a", 0, *runs(leases)).revoked


def test_silent_runs_and_instances_are_forgotten() -> None:
    world = World()
    world.poll("a", 2)
    world.now += FORGET + 1
    world.ledger.expire(world.now)
    assert (world.ledger.runs, world.ledger.instances) == ({}, {})


def test_tokens_are_counted_once() -> None:
    world = World(groups=1, slots=1)
    (lease,) = world.poll("a").leases
    for tokens in (5, 9, 9):
        world.poll("a", 0, progress_of(lease.number, tokens))
    world.poll("a", 0, progress_of(lease.number, 12, returned=True))
    (again,) = world.poll("b").leases
    world.poll("b", 0, progress_of(again.number, 4))
    world.poll("b", 0, progress_of(again.number, 15, finished=True))
    assert world.ledger.tally["tokens"] == 15
