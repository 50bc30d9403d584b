"""Whom a change wakes, what it costs, and that both are what the plain formulas say."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.config import BubblesConfig
from services.bubbles.ledger import BubbleLedger, SharingMembers
from services.bubbles.plan import HeldPolls, PollKind, PregenerationPlan, WorkAnswer
from services.bubbles.pool import PooledTask, StepPool
from services.bubbles.service import HOLD_SECONDS, BubbleMetrics, BubbleService
from tests.unit.bubbles.hints import hint, named, progress_of, run_status, work_poll

PHASES = (pb.RUN_PHASE_ROLLOUT, pb.RUN_PHASE_UPDATE, pb.RUN_PHASE_APPLYING)
NAMES = ("a", "b", "c", "d")
CONTEXT: Any = None


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("hear"), st.sampled_from(NAMES), st.floats(0, 4)),
            st.tuples(st.just("alive"), st.sets(st.sampled_from(NAMES)), st.floats(0, 4)),
        ),
        max_size=30,
    )
)
def test_members_are_counted_as_one_by_one(steps: list[tuple[str, object, float]]) -> None:
    members, seen, alive, now = SharingMembers(5.0), dict[str, float](), set[str](), 100.0
    for what, who, pause in steps:
        now += pause
        if isinstance(who, str):
            members.note_poll(who, now)
            seen[who] = now
        elif isinstance(who, set):
            members.set_alive(who)
            alive = who
        heard = {name for name, at in seen.items() if now - at <= 5.0}
        assert members.count(now) == max(1, len(heard | alive)), what


def plain_take(free: list[PooledTask], most: int, instance_id: str, prompts: set[str]) -> list[PooledTask]:
    """Take from the free tasks of one wave, by a sort over all of them."""

    def affinity(task: PooledTask) -> int:
        return 0 if task.last == instance_id else 1 if task.group.prompt_id in prompts else 2

    taken = list(free) if most >= len(free) else sorted(free, key=affinity)[:most]
    for task in taken:
        free.remove(task)
    return taken


@given(seed=st.integers(0, 2**32), width=st.integers(1, 9))
def test_a_wave_gives_what_a_sort_of_all_its_tasks_gives(seed: int, width: int) -> None:
    draw = random.Random(seed)
    pool = StepPool(hint({f"p{at}": 10.0 for at in range(width)}, slots=1))
    free, leased = list(pool.tasks.values()), list[PooledTask]()
    for _ in range(30):
        if leased and draw.random() < 0.5:
            task = leased.pop(draw.randrange(len(leased)))
            pool.keep(task, draw.choice(NAMES))
            pool.put_back(task)
            free.append(task)
        elif draw.random() < 0.3:
            # A late word of an instance on a task that is free already.
            pool.keep(draw.choice(list(pool.tasks.values())), draw.choice(NAMES))
        else:
            most, name = draw.randrange(1, width + 2), draw.choice(NAMES)
            prompts = {f"p{at}" for at in range(width) if draw.random() < 0.3}
            wanted = plain_take(free, most, name, prompts)
            assert pool.take(most, name, prompts) == wanted
            leased += wanted
        assert (pool.free, pool.leased) == (len(free), len(leased))


def random_change(draw: random.Random, ledger: BubbleLedger, plan: PregenerationPlan, now: float) -> None:
    """Change the ledger as gateway, registry or instances may."""
    what, run_id = draw.randrange(5), draw.choice(("r", "s"))
    if what == 0:
        status = run_status(
            draw.choice(PHASES), draw.randrange(2), draw.randrange(3), draw.randrange(2), draw.randrange(2)
        )
        ledger.set_run(named(status, run_id, [f"{run_id}-{step}" for step in (1, 2, 3)]), now)
    elif what == 1:
        ledger.put_hint(hint({"p": 9.0, "q": 3.0}, step=draw.choice((1, 2, 3)), run_id=run_id), now)
    elif what == 2:
        ledger.set_alive({name: draw.randrange(4) for name in NAMES if draw.random() < 0.7})
    elif what == 3:
        ledger.expire(now)
    else:
        name = draw.choice(NAMES)
        known = ledger.instances.get(name)
        told = [
            progress_of(number, 3, **{draw.choice(("finished", "returned")): True})
            for number in (known.leases if known else {})
        ]
        poll = work_poll(name, 1, draw.randrange(2), draw.randrange(4), told)
        ledger.report(poll, now)
        plan.answer(poll, now)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32), intra=st.booleans(), mode=st.sampled_from(("pregenerate", "halt", "sleep"))
)
def test_exactly_those_are_woken_whose_answer_says_something(seed: int, intra: bool, mode: str) -> None:
    draw = random.Random(seed)
    config = BubblesConfig(intra_instance=intra, intra_threshold=1, during_update=mode, lease_seconds=5)
    ledger, now = BubbleLedger(config), 100.0
    plan = PregenerationPlan(ledger)
    for _ in range(15):
        now += draw.choice((0.0, 0.5, 4.0))
        random_change(draw, ledger, plan, now)
        for name in (*NAMES, "stranger"):
            poll = work_poll(name, 1, draw.randrange(2), draw.randrange(3), serving=draw.random() < 0.5)
            if name != "stranger":
                ledger.report(poll, now)
            kind = plan.kind(poll)
            # Answering changes the ledger, so that a copy is asked.
            answer = PregenerationPlan(copy.deepcopy(ledger)).answer(poll, now)
            assert (kind is not None and plan.has_answer(kind, now)) == (not answer.quiet)


def test_the_first_of_each_kind_is_woken_and_then_the_next() -> None:
    held, one, other = HeldPolls(), PollKind(1, True, (False, False)), PollKind(2, True, (False, False))
    for name in ("a", "b", "c"):
        held.hold(name, one)
    held.hold("d", other)
    assert held.first(lambda kind: True) == ["a", "d"]
    assert held.first(lambda kind: kind is other) == ["d"]
    held.leave("a")
    held.hold("b", other)
    assert held.first(lambda kind: True) == ["c", "d"]
    held.leave("d")
    assert held.first(lambda kind: kind is other) == ["b"]
    assert "b" in held
    assert "d" not in held


async def test_a_returned_task_wakes_one_poll_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bubbles.service.HOLD_SECONDS", 3600.0)
    answered: list[str] = []
    answer = PregenerationPlan.answer

    def counted(plan: PregenerationPlan, poll: pb.PollWorkRequest, now: float) -> WorkAnswer:
        answered.append(poll.instance_id)
        return answer(plan, poll, now)

    monkeypatch.setattr(PregenerationPlan, "answer", counted)
    service = BubbleService(BubblesConfig(), BubbleMetrics(CollectorRegistry()), lambda _: None)
    work = hint({"p": 9.0}, slots=2)
    await service.SetRun(named(run_status(pb.RUN_PHASE_ROLLOUT, 0, 0, 1), "run", [work.hint_id]), CONTEXT)
    await service.PutHint(work, CONTEXT)
    (first, second) = (await service.PollWork(work_poll("busy", 1, 0, 2), CONTEXT)).tasks
    held = [asyncio.create_task(service.PollWork(work_poll(f"i{at}", 1, 0, 2), CONTEXT)) for at in range(50)]
    while len(answered) < 51:  # noqa: ASYNC110 (nothing is set when it is)
        await asyncio.sleep(0)
    answered.clear()
    told = [progress_of(first.lease, 4, returned=True), progress_of(second.lease, 4)]
    poll = work_poll("busy", 1, 0, 0, told)
    poll.coordinator_epoch = service.epoch
    assert not (await service.PollWork(poll, CONTEXT)).tasks
    (task,) = (await held[0]).tasks
    assert (task.prompt_id, task.slot) == (first.prompt_id, first.slot)
    # The next one may be woken before the first has taken the task.
    assert {"busy", "i0"} <= set(answered) <= {"busy", "i0", "i1"}
    # What concerns all is told to all.
    await service.SetRun(named(run_status(pb.RUN_PHASE_APPLYING, 0, 0), "run", [work.hint_id]), CONTEXT)
    assert all(response.halt for response in await asyncio.gather(*held[1:]))


async def test_a_poll_with_nothing_to_say_is_held_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    service = BubbleService(BubblesConfig(), BubbleMetrics(CollectorRegistry()), lambda _: None)
    polling = asyncio.create_task(service.PollWork(work_poll("a", 1, 0, 2), CONTEXT))
    await turns()
    now += 0.99 * HOLD_SECONDS
    await turns()
    assert not polling.done()
    now += 0.02 * HOLD_SECONDS
    await turns()
    response = polling.result()
    assert (list(response.tasks), response.halt, response.sleep) == ([], False, False)
