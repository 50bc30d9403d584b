"""Work on several shards at once, in tasks and in threads: results, stopped work and remaining events."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator

import pytest

from paceline.blocking import StopSignal, finish, iterate, on_stop, stopped_by
from paceline.errors import CancelledError
from paceline.shards.concurrency import MOST_AHEAD, Tasks, Threads

SECONDS = 60.0


class Stopped(Exception):
    """Raised by a wait that was stopped."""


async def wait_in_thread(arrived: threading.Event | None = None) -> int:
    """Wait until it is stopped, as a call on a blocking transport does."""
    wake = threading.Event()
    with on_stop(wake.set):
        if arrived is not None:
            arrived.set()
        assert wake.wait(SECONDS)
    raise Stopped


async def fail() -> int:
    raise ValueError("broken")


async def return_number() -> int:
    return 3


def test_an_error_in_a_thread_stops_the_others() -> None:
    outcomes = finish(Threads().gather([wait_in_thread(), fail(), wait_in_thread()], keep_going=False))
    assert [type(each) for each in outcomes] == [CancelledError, ValueError, CancelledError]


def test_threads_that_are_to_keep_going_end_by_themselves() -> None:
    outcomes = finish(Threads().gather([return_number(), fail(), return_number()], keep_going=True))
    assert (outcomes[0], outcomes[2]) == (3, 3)
    assert isinstance(outcomes[1], ValueError)


def test_the_first_runs_in_the_calling_thread() -> None:
    async def thread() -> int:
        return threading.get_ident()

    own, other = finish(Threads().gather([thread(), thread()], keep_going=False))
    assert own == threading.get_ident() != other


def test_threads_under_a_signal_are_stopped_by_it() -> None:
    outer, arrived = StopSignal(), threading.Event()
    stopper = threading.Thread(target=lambda: (arrived.wait(SECONDS), outer.stop()))
    stopper.start()
    with stopped_by(outer):
        outcomes = finish(Threads().gather([wait_in_thread(arrived), wait_in_thread()], keep_going=True))
    stopper.join()
    assert [type(each) for each in outcomes] == [Stopped, Stopped]


def test_an_interrupt_stops_the_threads() -> None:
    ended = threading.Event()

    async def interrupt() -> int:
        raise KeyboardInterrupt

    async def wait() -> int:
        try:
            return await wait_in_thread()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        finish(Threads().gather([interrupt(), wait()], keep_going=True))
    assert ended.wait(SECONDS)


def test_a_signal_that_has_stopped_stops_at_once() -> None:
    signal, stopped = StopSignal(), list[int]()
    signal.stop()
    with signal.on_stop(lambda: stopped.append(1)):
        assert stopped == [1]


async def test_an_error_in_a_task_stops_the_others() -> None:
    outcomes = await Tasks().gather([asyncio.sleep(SECONDS), fail()], keep_going=False)
    assert [type(each) for each in outcomes] == [CancelledError, ValueError]


async def count(first: int, end: int) -> AsyncGenerator[int, None]:
    for number in range(first, end):
        yield number


def merged(streams: list[AsyncGenerator[int, None]], ahead: deque[int]) -> Iterator[int]:
    return iterate(Threads().merge(streams, ahead))


def test_threads_give_every_event_once_and_those_of_a_stream_in_order() -> None:
    got = list(merged([count(0, 3000), count(5000, 8000)], deque()))
    assert [number for number in got if number < 5000] == list(range(3000))
    assert [number for number in got if number >= 5000] == list(range(5000, 8000))


def test_events_that_threads_read_ahead_are_kept_and_bounded() -> None:
    ahead, source = deque[int](), count(0, 10_000)
    events = merged([source], ahead)
    got = [next(events) for _ in range(3)]
    events.close()  # type: ignore[attr-defined]
    assert len(ahead) <= MOST_AHEAD
    assert [*got, *ahead] == list(range(3 + len(ahead)))
    assert finish(_ended(source)), "its reader has closed it"


async def _ended(stream: AsyncGenerator[int, None]) -> bool:
    return [each async for each in stream] == []


def test_the_error_of_a_stream_stops_the_other_threads() -> None:
    async def waits() -> AsyncGenerator[int, None]:
        yield await wait_in_thread()

    async def fails() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("broken")

    events = merged([waits(), fails()], deque())
    with pytest.raises(ValueError, match="broken"):
        list(events)


async def test_tasks_give_every_event_once_and_keep_untaken_ones() -> None:
    ahead = deque[int]()
    events = Tasks().merge([count(0, 1000), count(5000, 6000)], ahead)
    got = [await anext(events) for _ in range(700)]
    await events.aclose()
    assert len(ahead) <= MOST_AHEAD + 1
    assert sorted({*got, *ahead}) == sorted([*got, *ahead])
    left = list(ahead)
    assert [each async for each in Tasks().merge([], ahead)] == left


async def test_the_error_of_a_stream_ends_the_other_tasks() -> None:
    closed = list[int]()

    async def waits() -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(SECONDS)
            yield 1
        finally:
            closed.append(1)

    async def fails() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        async for _ in Tasks().merge([waits(), fails()], deque()):
            pass
    assert closed == [1]
