"""Work on several shards at once: in tasks of an event loop, or in threads of a client that has none."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

import grpc

from paceline.blocking import StopSignal, finish, iterate, on_stop, stopped_by
from paceline.errors import CancelledError

R = TypeVar("R")

MOST_AHEAD = 256
"""Most events that are read ahead of their reader."""


class Concurrency(Protocol):
    """Way to run coroutines concurrently."""

    async def gather(self, work: Sequence[Coroutine[Any, Any, R]], keep_going: bool) -> list[R | Exception]:
        """Run coroutines and return the result or the error of each; the first runs in the calling thread.

        Unless they are to `keep_going`, the first error stops the others, whose errors are then `CancelledError`.
        """

    def merge(self, streams: Sequence[AsyncGenerator[R, None]], ahead: deque[R]) -> AsyncGenerator[R, None]:
        """Iterate over the events of all streams in order of arrival; the first error ends it, and the streams.

        Events are read ahead into `ahead`, where the events that were not taken remain when the iteration is left.
        """


class Tasks:
    """Runs coroutines as tasks of the running event loop."""

    async def gather(self, work: Sequence[Coroutine[Any, Any, R]], keep_going: bool) -> list[R | Exception]:
        """Run coroutines and return the result or the error of each."""
        tasks = [asyncio.create_task(each) for each in work]
        when = asyncio.ALL_COMPLETED if keep_going else asyncio.FIRST_EXCEPTION
        try:
            ended, _ = await asyncio.wait(tasks, return_when=when)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return [
            _stopped() if isinstance(outcome, BaseException) and task not in ended else cast("R", outcome)
            for task, outcome in zip(tasks, outcomes, strict=True)
        ]

    async def merge(
        self, streams: Sequence[AsyncGenerator[R, None]], ahead: deque[R]
    ) -> AsyncGenerator[R, None]:
        """Iterate over the events of all streams in order of arrival."""
        arrived, taken = asyncio.Event(), asyncio.Event()
        ended: list[BaseException | None] = []

        async def read(stream: AsyncGenerator[R, None]) -> None:
            try:
                async with aclosing(stream):
                    async for event in stream:
                        ahead.append(event)
                        arrived.set()
                        while len(ahead) >= MOST_AHEAD:
                            taken.clear()
                            await taken.wait()
                ended.append(None)
            except BaseException as error:
                ended.append(error)
                raise
            finally:
                arrived.set()

        tasks = [asyncio.create_task(read(stream)) for stream in streams]
        try:
            while True:
                _raise_first(ended)
                if ahead:
                    yield ahead.popleft()
                    taken.set()
                elif len(ended) == len(streams):
                    return
                else:
                    arrived.clear()
                    await arrived.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Threads:
    """Runs coroutines that never suspend, each in a thread; a stop signal ends their calls and waits."""

    async def gather(self, work: Sequence[Coroutine[Any, Any, R]], keep_going: bool) -> list[R | Exception]:
        """Run coroutines and return the result or the error of each."""
        outcomes: list[R | Exception] = [_stopped()] * len(work)
        signal, failed = StopSignal(), list[int]()

        def run(number: int) -> None:
            try:
                with stopped_by(signal):
                    outcomes[number] = finish(work[number])
            except Exception as error:
                failed.append(number)
                if keep_going or failed[0] == number:
                    outcomes[number] = error
                if not keep_going:
                    signal.stop()

        threads = [_thread(run, number) for number in range(1, len(work))]
        try:
            run(0)
            with on_stop(signal.stop):
                for thread in threads:
                    thread.join()
        except BaseException:
            signal.stop()
            raise
        return outcomes

    async def merge(
        self, streams: Sequence[AsyncGenerator[R, None]], ahead: deque[R]
    ) -> AsyncGenerator[R, None]:
        """Iterate over the events of all streams in order of arrival."""
        signal, changed = StopSignal(), threading.Condition()
        ended: list[BaseException | None] = []
        left = False

        def read(number: int) -> None:
            error: BaseException | None = None
            try:
                with stopped_by(signal):
                    for event in iterate(streams[number]):
                        with changed:
                            ahead.append(event)
                            changed.notify_all()
                            changed.wait_for(lambda: left or len(ahead) < MOST_AHEAD)
                            if left:
                                return
            except BaseException as raised:
                error = raised
            finally:
                with changed:
                    ended.append(error)
                    changed.notify_all()

        threads = [_thread(read, number) for number in range(len(streams))]
        try:
            while True:
                with changed:
                    changed.wait_for(lambda: ahead or any(ended) or len(ended) == len(streams))
                    _raise_first(ended)
                    if not ahead:
                        return
                    event = ahead.popleft()
                    changed.notify_all()
                yield event
        finally:
            with changed:
                left = True
                changed.notify_all()
            signal.stop()
            for thread in threads:
                thread.join()


def _thread(run: Any, number: int) -> threading.Thread:
    thread = threading.Thread(target=run, args=(number,), name=f"paceline-shard-{number}", daemon=True)
    thread.start()
    return thread


def _raise_first(ended: Sequence[BaseException | None]) -> None:
    for error in ended:
        if error is not None:
            raise error


def _stopped() -> CancelledError:
    return CancelledError(grpc.StatusCode.CANCELLED, "stopped, because another shard failed")
