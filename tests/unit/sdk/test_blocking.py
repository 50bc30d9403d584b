"""The synchronous face: coroutines that run to their end without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from paceline import (
    AsyncClient,
    AsyncOpenBatch,
    AsyncRollout,
    AsyncRun,
    AsyncSession,
    AsyncSessions,
    Client,
    OpenBatch,
    Rollout,
    Run,
    Session,
    Sessions,
)
from paceline.blocking import Face, finish, iterate

INTERNAL = (
    *("call", "events", "run_work", "send_batch", "post_ack", "dial", "sleep", "shards", "step_stats"),
    *("continue_sample", "events_with_calls", "wait_for", "leave", "take", "called", "ended", "send"),
)
"""Methods of cores that only cores call."""
# Rollouts are begun by their runs.
_BEGUN = (AsyncRollout, AsyncOpenBatch)


class Counter:
    """A core whose generator records its items and its end."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.closed = 0

    async def add(self, number: int, *, twice: bool = False) -> int:
        """Add a number."""
        if number < 0:
            raise ValueError("negative")
        return number * (1 + twice)

    async def count(self, end: int) -> AsyncIterator[int]:
        """Count to a number."""
        try:
            for number in range(end):
                self.given.append(number)
                yield number
        finally:
            self.closed += 1


class CounterFace(Face[Counter]):
    def add(self, number: int, *, twice: bool = False) -> int:
        return finish(self._core.add(number, twice=twice))

    def count(self, end: int) -> Iterator[int]:
        return iterate(self._core.count(end))


@pytest.fixture
def core() -> Counter:
    return Counter()


@pytest.fixture
def face(core: Counter) -> CounterFace:
    return CounterFace._of(core)


def test_a_call_returns_and_raises_as_the_coroutine_does(face: CounterFace) -> None:
    assert face.add(2, twice=True) == 4
    with pytest.raises(ValueError, match="negative") as caught:
        face.add(-1)
    frames = [frame.name for frame in caught.traceback]
    assert (frames[0], frames[-1]) == ("test_a_call_returns_and_raises_as_the_coroutine_does", "add")


def test_leaving_an_iteration_closes_it(face: CounterFace, core: Counter) -> None:
    for number in face.count(5):
        if number == 2:
            break
    assert (core.given, core.closed) == ([0, 1, 2], 1)
    assert list(face.count(3)) == [0, 1, 2]
    assert core.closed == 2


def test_an_interrupt_passes_through(core: Counter) -> None:
    async def interrupted() -> AsyncIterator[int]:
        try:
            yield 1
            raise KeyboardInterrupt
        finally:
            core.closed += 1

    events = iterate(interrupted())
    assert next(events) == 1
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert core.closed == 1


def test_a_coroutine_that_suspends_is_refused() -> None:
    with pytest.raises(RuntimeError, match="suspended"):
        finish(asyncio.sleep(0))


def test_an_event_loop_in_the_same_thread_does_not_adopt_a_stream(face: CounterFace, core: Counter) -> None:
    async def begin() -> Iterator[int]:
        hooks = sys.get_asyncgen_hooks()
        events = face.count(3)
        assert next(events) == 0
        assert face.add(1) == 1
        assert sys.get_asyncgen_hooks() == hooks
        return events

    events = asyncio.run(begin())
    assert core.closed == 0, "the end of the loop ended the stream"
    assert list(events) == [1, 2]


def test_threads_share_a_face(face: CounterFace) -> None:
    got: list[list[int]] = []
    threads = [threading.Thread(target=lambda: got.append(list(face.count(200)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [list(range(200))] * 8


@pytest.mark.parametrize(
    ("face", "core"),
    [
        (Client, AsyncClient),
        (Run, AsyncRun),
        (Rollout, AsyncRollout),
        (OpenBatch, AsyncOpenBatch),
        (Session, AsyncSession),
        (Sessions, AsyncSessions),
    ],
)
def test_every_public_member_has_a_face_with_its_signature_and_text(face: type, core: type) -> None:
    assert face.__doc__ == core.__doc__
    members = {
        name: member
        for name, member in inspect.getmembers(core)
        if name[0] != "_" and name not in INTERNAL and not (name == "begin" and core in _BEGUN)
    }
    assert members
    for name, member in [*members.items(), *([("__init__", core.__init__)] if face is Client else [])]:
        here = inspect.getattr_static(face, name)
        assert here.__doc__ == member.__doc__, name
        if isinstance(member, property):
            assert member.fget
            assert inspect.signature(here.fget) == inspect.signature(member.fget)
            continue
        # What only the asynchronous client can read is left out.
        taken = [
            str(each).replace(" | AsyncIterable[Iterable[t.Group]]", "")
            for each in inspect.signature(member).parameters.values()
        ]
        assert list(map(str, inspect.signature(here).parameters.values())) == taken, name
        returned = re.sub(r"\bAsync(?=[A-Z])", "", inspect.signature(member).return_annotation)
        assert inspect.signature(here).return_annotation == returned, name
        assert not inspect.iscoroutinefunction(here)
        # An editor goes to where the method is written.
        assert inspect.getsourcefile(inspect.unwrap(here)) == inspect.getsourcefile(face)
    attributes = [
        name for each in core.__mro__ for name in getattr(each, "__annotations__", ()) if name[0] != "_"
    ]
    assert all(getattr(face, name).__doc__ for name in attributes)


def test_the_same_session_is_the_same_object() -> None:
    face, core = CounterFace._of(Counter()), Counter()
    assert face._part(CounterFace, core) is face._part(CounterFace, core)
    assert face._part(CounterFace, core) is not face._part(CounterFace, Counter())
