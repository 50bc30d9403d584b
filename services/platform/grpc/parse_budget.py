"""Bound on the memory of the messages that a server has received and works on, over all its callers.

A message is counted on its bytes (`wire_count`) before it is parsed, and what is counted is held until it has been
handled. Small messages never wait. Large ones wait for room; callers take turns, so that nobody waits for all that
another has sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument, ResourceExhausted
from services.platform.grpc.wire_count import FIELD_BYTES, Malformed, Shape, count

SMALL_BYTES = 64 << 10
"""A message that is counted as no more than this never waits."""
MESSAGE_FACTOR = 20
"""Counted bytes that a message may have for each byte of the size limit; one of packed token ids has at most 17."""
LEAST_MESSAGE_BYTES = 64 << 20
"""Counted bytes that a message may have under any size limit."""
WAIT_SECONDS = 10.0
"""Longest time that a message waits for room."""
RETRY_SECONDS = 1.0
"""Seconds after which a caller for whose message there was no room is told to come again."""

NO_MESSAGE = Violation("request", "is not an encoded message of this method")


class ParseBudget:
    """Budget of one server; it belongs to its event loop."""

    def __init__(self, most_bytes: int, max_message_bytes: int) -> None:
        """Messages of `most_bytes`, as counted, are handled at once, or a single one; half as many bytes wait."""
        self._most = most_bytes
        self._most_waiting = most_bytes // 2
        self._most_one = max(LEAST_MESSAGE_BYTES, MESSAGE_FACTOR * max_message_bytes)
        self._lines: dict[str, deque[_Waiter]] = {}
        self._turn = asyncio.Lock()
        self.held = 0
        """Counted bytes of the messages that are being handled."""

    @property
    def waiting(self) -> int:
        """Bytes of the messages that wait."""
        return sum(map(_waiting, self._lines.values()))

    async def take(self, request: bytes, shape: Shape, caller: Callable[[], str]) -> int:
        """Return the bytes counted for a message, which are held until `give_back`.

        Raises:
            InvalidArgument: the bytes are no message, or one that takes too much memory.
            ResourceExhausted: there is no room now.
        """
        counting = count(request, shape)
        counted = self._slice(counting)
        if counted is not None and (counted <= SMALL_BYTES or (not self._lines and self._fits(counted))):
            self.held += counted
            return counted
        try:
            with self._in_line(caller(), len(request)) as waiter:
                async with asyncio.timeout(WAIT_SECONDS):
                    while counted is None:
                        async with self._turn:
                            waiter.check()
                            counted = self._slice(counting)
                            # One slice, of whichever message, in each turn of the loop: other calls go on.
                            await asyncio.sleep(0)
                    return await self._room(waiter, counted)
        except TimeoutError:
            raise _no_room(f"got no room for {WAIT_SECONDS:g} s") from None

    def give_back(self, counted: int) -> None:
        """Give back the bytes of a message that was handled."""
        self.held -= counted
        self._admit()

    def _slice(self, counting: Generator[int, None, int]) -> int | None:
        """Count a slice of a message; return the sum after the last one, None before."""
        try:
            counted, whole = next(counting), False
        except StopIteration as last:
            counted, whole = last.value, True
        except Malformed as error:
            raise InvalidArgument([NO_MESSAGE]) from error
        if counted > self._most_one:
            text = (
                f"takes more than {self._most_one} bytes in memory, of which {FIELD_BYTES} are counted for each "
                "field and 16 for each token id; send it in several calls"
            )
            raise InvalidArgument([Violation("request", text)])
        return counted if whole else None

    def _fits(self, counted: int) -> bool:
        return not self.held or self.held + counted <= self._most

    async def _room(self, waiter: _Waiter, counted: int) -> int:
        waiter.wants = counted
        self._admit()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self.give_back(counted)
            raise
        return counted

    def _admit(self) -> None:
        """Admit messages in line, one of each caller in turn, until the next one does not fit."""
        admitting = True
        while admitting:
            admitting = False
            for caller, line in list(self._lines.items()):
                first = next((waiter for waiter in line if waiter.wants and not waiter.admitted.done()), None)
                if first is None:
                    continue
                if not self._fits(first.wants):
                    return
                self.held += first.wants
                first.admitted.set_result(None)
                # To the end of the round.
                self._lines[caller] = self._lines.pop(caller)
                admitting = True

    @contextmanager
    def _in_line(self, caller: str, size: int) -> Iterator[_Waiter]:
        waiter = _Waiter(size)
        line = self._lines.setdefault(caller, deque())
        line.append(waiter)
        try:
            while self.waiting > self._most_waiting:
                # The last of whoever has most in line.
                longest = max(self._lines.values(), key=_waiting)
                next(each for each in reversed(longest) if not each.admitted.done()).refuse()
            yield waiter
        finally:
            line.remove(waiter)
            if not line:
                del self._lines[caller]


class _Waiter:
    """Message in line: its bytes, and what it wants once it is counted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wants = 0
        self.admitted = asyncio.get_running_loop().create_future()

    def refuse(self) -> None:
        """Let the call end with ResourceExhausted."""
        self.admitted.set_exception(_no_room("others wait for room already"))
        # It may have left the line, so that nobody asks for it.
        self.admitted.exception()

    def check(self) -> None:
        """Raise if it was refused."""
        if self.admitted.done():
            self.admitted.result()


def _waiting(line: deque[_Waiter]) -> int:
    return sum(waiter.size for waiter in line if not waiter.admitted.done())


def _no_room(why: str) -> ResourceExhausted:
    return ResourceExhausted("parsing", f"the message is large and {why}; come again", RETRY_SECONDS)
