"""Ending tasks: a dropped cancellation, and an impatient caller, change nothing about the outcome."""

from __future__ import annotations

import asyncio

import pytest

from services.platform.tasks import end, is_cancelled, to_the_end, uninterrupted, until_one_ends


async def _drops(times: int) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            times -= 1
            if times < 0:
                raise


async def test_tasks_end_even_if_they_drop_a_cancellation() -> None:
    tasks = [asyncio.create_task(_drops(times)) for times in (0, 1, 2)]
    await asyncio.sleep(0)
    await end(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_tasks_end_even_if_the_caller_is_cancelled_meanwhile() -> None:
    task = asyncio.create_task(_drops(2))
    await asyncio.sleep(0)
    ending = asyncio.create_task(end([task]))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled()
    assert task.cancelled()


async def test_what_a_task_raised_stays_in_it() -> None:
    async def fails() -> None:
        raise ValueError("no")

    task = asyncio.create_task(fails())
    await asyncio.wait([task])
    await end([task])
    assert isinstance(task.exception(), ValueError)


async def test_when_one_ends_the_others_are_ended_and_its_error_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def ends() -> None:
        return

    forever = asyncio.create_task(_drops(1))
    await asyncio.sleep(0)
    await until_one_ends([forever, asyncio.create_task(ends())])
    assert forever.cancelled()
    forever = asyncio.create_task(_drops(0))
    with pytest.raises(ValueError, match="no"):
        await until_one_ends([forever, asyncio.create_task(fails())])
    assert forever.cancelled()


async def test_a_task_knows_that_it_was_cancelled_though_the_cancellation_was_dropped() -> None:
    said: list[bool] = []

    async def asks() -> None:
        said.append(is_cancelled())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            said.append(is_cancelled())

    task = asyncio.create_task(asks())
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert said == [False, True]


async def test_work_goes_on_to_its_end_if_the_waiting_is_cancelled() -> None:
    gate, done, running = asyncio.Event(), list[int](), set[asyncio.Task[object]]()

    async def work() -> int:
        await gate.wait()
        done.append(1)
        return 7

    waiting = asyncio.create_task(to_the_end(work(), running))
    await asyncio.sleep(0)
    await end([waiting])
    (task,) = running
    gate.set()
    assert await task == 7
    assert (done, running) == ([1], set())
    assert await to_the_end(work(), running) == 7


async def test_a_cancellation_waits_for_work_that_cannot_be_interrupted() -> None:
    loop = asyncio.get_running_loop()
    for outcome in (7, ValueError("no")):
        work, hastened = loop.create_future(), list[int]()
        waiting = asyncio.create_task(uninterrupted(work, lambda hastened=hastened: hastened.append(1)))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        assert not waiting.done()
        assert hastened
        if isinstance(outcome, int):
            work.set_result(outcome)
        else:
            work.set_exception(outcome)
        await asyncio.wait([waiting])
        assert waiting.cancelled()
    answered = loop.create_future()
    answered.set_result(7)
    assert await uninterrupted(answered) == 7
