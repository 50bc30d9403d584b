"""Long work in short turns, and what may happen to a batch between two of them."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.gateway.scheduler.active_batches import RunningBatch
from services.gateway.scheduler.turns import Pace, Turns
from services.gateway.state.sample import SamplePhase
from services.platform.observability import event_loop
from services.platform.observability.event_loop import MeteredLoop
from tests.unit.gateway.scheduler_parts import RecordingLink, SchedulerParts, a_batch, finished, tokens

ONE_STEP = 0.0
"""Seconds of a turn that has time for one step only."""


async def turns(count: int) -> None:
    """Let the event loop have so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


def count_to(number: int, seen: list[str], name: str = "") -> Generator[None, None, int]:
    for step in range(number):
        seen.append(f"{name}{step}")
        yield
    return number


# The runner --------------------------------------------------------------------------------------------


async def test_short_work_is_done_at_once() -> None:
    seen: list[str] = []
    result = Turns(seconds=60).run(count_to(3, seen))
    assert (seen, result.result()) == (["0", "1", "2"], 3)


async def test_long_work_lets_the_event_loop_have_its_turn_between_steps() -> None:
    seen: list[str] = []
    asyncio.get_running_loop().call_soon(seen.append, "other")
    result = Turns(ONE_STEP).run(count_to(3, seen))
    assert seen == ["0"]
    assert await result == 3
    assert seen == ["0", "other", "1", "2"]


async def test_all_work_begun_in_one_turn_shares_its_time_and_keeps_its_order() -> None:
    seen: list[str] = []
    runner = Turns(ONE_STEP)
    results = [runner.run(count_to(2, seen, name)) for name in "abc"]
    assert seen == ["a0"]
    assert await asyncio.gather(*results) == [2, 2, 2]
    assert seen == ["a0", "a1", "b0", "b1", "c0", "c1"]


async def test_work_that_fails_does_not_stop_the_next() -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise ValueError("broken")

    runner, seen = Turns(ONE_STEP), list[str]()
    failed, done = runner.run(failing()), runner.run(count_to(2, seen))
    with pytest.raises(ValueError, match="broken"):
        await failed
    assert await done == 2


async def test_work_goes_on_when_nobody_waits_for_it_any_more() -> None:
    runner, seen = Turns(ONE_STEP), list[str]()
    runner.run(count_to(3, seen)).cancel()
    await turns(5)
    assert seen == ["0", "1", "2"]


async def test_work_begun_by_a_step_comes_after_what_waits_already() -> None:
    runner, seen = Turns(ONE_STEP), list[str]()

    def nesting() -> Generator[None, None, None]:
        runner.run(count_to(1, seen, "inner"))
        yield

    runner.run(nesting())
    await runner.run(count_to(1, seen, "outer"))
    await turns(3)
    assert seen == ["inner0", "outer0"]


async def test_messages_that_find_no_time_left_in_a_turn_wait_for_a_later_one_in_their_order() -> None:
    seen: list[str] = []

    async def handle(pace: Pace, name: str) -> None:
        await pace.wait()
        seen.append(name)

    async def other() -> None:
        await turns(2)
        seen.append("other")

    pace = Pace(ONE_STEP)
    await asyncio.gather(*(handle(pace, name) for name in "abcd"), other())
    assert [name for name in seen if name != "other"] == list("abcd")
    assert seen.index("other") < seen.index("d")
    unhurried = Pace(60.0)
    seen.clear()
    await asyncio.gather(*(handle(unhurried, name) for name in "abcd"), other())
    assert seen == [*"abcd", "other"]


def test_the_loop_knows_its_longest_turn_by_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(wall=100.0, cpu=10.0)
    readings = SimpleNamespace(perf_counter=lambda: clock.wall, thread_time=lambda: clock.cpu)
    monkeypatch.setattr(event_loop, "time", readings)
    select = selectors.DefaultSelector.select

    def wait(selector: selectors.DefaultSelector, timeout: float | None = None) -> list[Any]:
        clock.wall += 64.0
        return select(selector, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", wait)

    async def busy() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeteredLoop)
        for wall, cpu in ((0.5, 0.25), (2.0, 0.5), (1.0, 0.75), (0.0, 0.0)):
            await asyncio.sleep(0)
            clock.wall += wall
            clock.cpu += cpu
        return loop.turns.longest_wall, loop.turns.longest_cpu

    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        # The time in which the loop waits for events is no part of a turn.
        assert runner.run(busy()) == (2.0, 0.75)


# Batches -----------------------------------------------------------------------------------------------


async def finish_all(parts: SchedulerParts, *links: RecordingLink) -> None:
    """Have the instances finish whatever they get, until nothing is unfinished; then all work is done."""
    answered: set[tuple[str, int]] = set()
    async with asyncio.timeout(60):
        while parts.batches.unfinished:
            for link in links:
                for handle in list(link.held):
                    parts.events.responded(link, tokens(handle, 5, 0))
                    parts.events.responded(link, finished(handle))
                    answered.add((link.instance_id, handle))
            parts.journal.write(parts.scheduler)
            await turns(1)
        await parts.scheduler.turns.run(count_to(1, []))
        parts.journal.write(parts.scheduler)


async def test_a_sample_cancelled_while_its_batch_is_still_being_queued_is_never_placed() -> None:
    parts = SchedulerParts(turn_seconds=ONE_STEP)
    running = parts.scheduler.add(a_batch(6))
    cancelling = parts.scheduler.cancel(running, [4], keep_partial=True)
    assert running.batch.samples[4].phase is SamplePhase.WAITING
    assert parts.metric("queued_samples") == 1
    assert await cancelling == 1
    link = parts.link("a", room=8)
    await finish_all(parts, link)
    assert sorted(item.slot for item in link.items) == [0, 1, 2, 3, 5]
    assert len(running.batch.endings) == 0
    assert running.batch.key not in parts.batches.by_key


async def test_a_batch_dropped_while_it_is_being_queued_leaves_nothing_even_if_its_name_comes_again() -> None:
    parts = SchedulerParts(turn_seconds=ONE_STEP)
    link = parts.link("a", room=3)
    old = parts.scheduler.add(a_batch(6))
    await turns(4)
    parts.scheduler.drop(old)
    placed = len(link.items)
    assert 0 < placed < 4
    new = parts.scheduler.add(a_batch(4))
    assert parts.batches.unfinished == 4
    await finish_all(parts, link)
    assert new.batch.is_done()
    assert len(link.items) == placed + 4
    assert (parts.metric("queued_samples"), link.slots.room, link.slots.load) == (0, 3, 0.0)


async def test_samples_of_a_lost_instance_may_be_cancelled_or_dropped_before_they_are_resumed() -> None:
    parts = SchedulerParts(turn_seconds=ONE_STEP)
    lost = parts.link("a", room=9)
    kept = parts.scheduler.add(a_batch(4))
    dropped = parts.scheduler.add(a_batch(4, batch_id="other"))
    await turns(30)
    assert len(lost.held) == 8
    parts.events.link_lost(lost, "gone")
    cancelling = parts.scheduler.cancel(kept, [3], keep_partial=True)
    parts.scheduler.drop(dropped)
    assert await cancelling == 1
    other = parts.link("b", room=9)
    await finish_all(parts, other)
    assert sorted(item.slot for item in other.items) == [0, 1, 2]
    assert kept.batch.is_done()
    assert (parts.metric("queued_samples"), other.slots.load) == (0, 0.0)


async def test_the_deadline_ends_a_batch_that_is_still_being_queued() -> None:
    parts = SchedulerParts(turn_seconds=ONE_STEP, abort_seconds=0.01)
    link = parts.link("a", room=2)
    running = parts.scheduler.add(a_batch(20, seconds=0.0))
    await parts.until(running.batch.is_done)
    assert len(link.aborted) == len(link.items)
    assert parts.metric("expired_samples_total") == 20


async def test_placing_many_samples_takes_many_turns() -> None:
    parts = SchedulerParts(turn_seconds=ONE_STEP)
    running = parts.scheduler.add(a_batch(5))
    await turns(8)
    link = parts.link("a", room=8)
    placed = []
    for _ in range(6):
        placed.append(len(running.places))
        await turns(1)
    assert placed == [0, 1, 2, 3, 4, 5]
    assert len(link.items) == 5


happenings = st.lists(
    st.tuples(
        st.sampled_from(("add", "cancel", "drop", "lose", "join", "answer", "wait")),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(happenings)
def test_whatever_happens_between_turns_every_sample_ends_once_and_nothing_is_left(
    events: list[tuple[str, int, int]],
) -> None:
    asyncio.run(_live_through(events))


async def _live_through(events: list[tuple[str, int, int]]) -> None:
    parts = SchedulerParts(turn_seconds=ONE_STEP)
    links: dict[str, RecordingLink] = {}
    current: dict[int, RunningBatch] = {}
    batches, given_up = list[RunningBatch](), set[RunningBatch]()
    for event, which, number in events:
        running, link = current.get(which), links.get(f"i{which}")
        if event == "add":
            batch = a_batch(number + 1, max_attempts=1000, batch_id=f"b{len(batches)}")
            current[which] = parts.scheduler.add(batch)
            batches.append(current[which])
        elif event == "cancel" and running is not None:
            parts.scheduler.cancel(running, [number % len(running.batch.samples)], keep_partial=True)
        elif event == "drop" and running is not None and not running.dropped:
            parts.scheduler.drop(running)
            given_up.add(running)
        elif event == "join" and link is None:
            links[f"i{which}"] = parts.link(f"i{which}", room=1 + number)
        elif event == "lose" and link is not None:
            del links[link.instance_id]
            parts.events.link_lost(link, "gone")
        elif event == "answer" and link is not None and link.held:
            handle = next(iter(link.held))
            parts.events.responded(link, tokens(handle, 5, 6))
            if number > 2:
                parts.events.responded(link, finished(handle))
        await turns(number)
        parts.journal.write(parts.scheduler)
    links.setdefault("last", parts.link("last", room=4))
    await finish_all(parts, *links.values())
    assert parts.batches.by_key == {}
    for running in batches:
        assert running.timers == {}
        if running not in given_up:
            assert running.batch.ended == parts.journal.records[running.batch.key].safe
            assert running.batch.is_done()
            left = running.left
            assert (left.waiting_samples, left.running_samples) == (0, 0)
            assert (left.waiting_tokens, left.running_tokens) == (0.0, 0.0)
    for link in links.values():
        for handle in list(link.held):
            parts.events.responded(link, finished(handle))
        assert (link.slots.load, link.slots.prompts) == (0.0, {})
    assert parts.metric("queued_samples") == 0
