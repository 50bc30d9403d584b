"""Bound the memory of the messages that a server handles at once, over all its callers.

Two bytes of a message can become an object of a hundred, so `count` estimates the memory from the bytes before they
are parsed, by the fields of the message's type. `ParseBudget` holds that estimate until the message has been
handled. Small messages never wait. Large ones wait for room, and callers take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument, ResourceExhausted

FIELD_BYTES = 256
"""Bytes counted for each field: more than protobuf takes for any of our messages, with some for its readers."""
VALUE_WIDTHS = 4
"""Widths counted for each packed number: arrays grow by doubling, and old and new array exist at once."""
SLICE_FIELDS = 2048
"""Fields counted at a time, in about a millisecond."""

SMALL_BYTES = 64 << 10
"""A message of at most this many counted bytes never waits."""
MESSAGE_FACTOR = 20
"""Most counted bytes of a message per byte of the size limit; packed token ids have at most 17."""
LEAST_MESSAGE_BYTES = 64 << 20
"""Counted bytes that a message may have with any size limit."""
WAIT_SECONDS = 10.0
"""Longest time that a message waits for room."""
RETRY_SECONDS = 1.0
"""Seconds after which a caller should retry a message for which there was no room."""

NO_MESSAGE = Violation("request", "is not an encoded message of this method")

Shape = dict[int, object]
"""Contents of the fields of a message by tag: a `Shape`, or the width in memory of numbers that may be packed.

A width is negative for numbers that also have it on the wire. Other fields take their bytes, and are left out.
"""

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
# Protobuf refuses messages that are nested more than 100 deep.
_DEEPEST = 128
_LONGEST_VARINT = 10
_CONTINUED = bytes(range(128, 256))
# Below this length, a copy without the continued bytes is faster than a call of numpy.
_FEW_BYTES = 8192

_ONE = {FieldDescriptor.TYPE_BOOL}
_FIXED = {
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED32,
    FieldDescriptor.TYPE_SFIXED64,
    FieldDescriptor.TYPE_FLOAT,
    FieldDescriptor.TYPE_DOUBLE,
}
_EIGHT = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64,
    FieldDescriptor.TYPE_DOUBLE,
}
_TEXT = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}


class ParseBudget:
    """Budget of one server, for use on its event loop."""

    def __init__(self, max_bytes: int, max_message_bytes: int) -> None:
        """Admit at most `max_bytes` counted bytes at once, or a single message; half as many bytes may wait."""
        self._max = max_bytes
        self._max_waiting = max_bytes // 2
        self._max_message = max(LEAST_MESSAGE_BYTES, MESSAGE_FACTOR * max_message_bytes)
        self._lines: dict[str, deque[_Waiter]] = {}
        self._turn = asyncio.Lock()
        self.held = 0
        """Counted bytes of the messages in work."""

    @property
    def waiting(self) -> int:
        """Bytes of the waiting messages."""
        return sum(map(_waiting, self._lines.values()))

    async def take(self, request: bytes, shape: Shape, caller: Callable[[], str]) -> int:
        """Wait for room for a message; return its counted bytes, which are held until `give_back`.

        Raises:
            InvalidArgument: the bytes are no message, or the message takes too much memory.
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
                            # One slice of one message in each turn of the loop, so that other calls continue.
                            await asyncio.sleep(0)
                    return await self._room(waiter, counted)
        except TimeoutError:
            raise _no_room(f"got no room for {WAIT_SECONDS:g} s") from None

    def give_back(self, counted: int) -> None:
        """Give back the counted bytes of a handled message."""
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
        if counted > self._max_message:
            text = (
                f"takes more than {self._max_message} bytes in memory, of which {FIELD_BYTES} are counted for each "
                "field and 16 for each token id; send it in several calls"
            )
            raise InvalidArgument([Violation("request", text)])
        return counted if whole else None

    def _fits(self, counted: int) -> bool:
        return not self.held or self.held + counted <= self._max

    async def _room(self, waiter: _Waiter, counted: int) -> int:
        waiter.counted = counted
        self._admit()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self.give_back(counted)
            raise
        return counted

    def _admit(self) -> None:
        """Admit waiting messages, one of each caller in turn, until the next one does not fit."""
        admitting = True
        while admitting:
            admitting = False
            for caller, line in list(self._lines.items()):
                first = next(
                    (waiter for waiter in line if waiter.counted and not waiter.admitted.done()), None
                )
                if first is None:
                    continue
                if not self._fits(first.counted):
                    return
                self.held += first.counted
                first.admitted.set_result(None)
                # The caller moves to the end of the round.
                self._lines[caller] = self._lines.pop(caller)
                admitting = True

    @contextmanager
    def _in_line(self, caller: str, size: int) -> Iterator[_Waiter]:
        waiter = _Waiter(size)
        line = self._lines.setdefault(caller, deque())
        line.append(waiter)
        try:
            while self.waiting > self._max_waiting:
                # Refuse the last message of the caller with the most waiting bytes.
                longest = max(self._lines.values(), key=_waiting)
                next(each for each in reversed(longest) if not each.admitted.done()).refuse()
            yield waiter
        finally:
            line.remove(waiter)
            if not line:
                del self._lines[caller]


class _Waiter:
    """Waiting message: its bytes, and its counted bytes once they are known."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.counted = 0
        self.admitted = asyncio.get_running_loop().create_future()

    def refuse(self) -> None:
        """End the call with ResourceExhausted."""
        self.admitted.set_exception(_no_room("others wait for room already"))
        # The call may have stopped waiting; asyncio must not report the error as never retrieved.
        self.admitted.exception()

    def check(self) -> None:
        """Raise if the message was refused."""
        if self.admitted.done():
            self.admitted.result()


def _waiting(line: deque[_Waiter]) -> int:
    return sum(waiter.size for waiter in line if not waiter.admitted.done())


def _no_room(why: str) -> ResourceExhausted:
    return ResourceExhausted("parsing", f"the message is large and {why}; come again", RETRY_SECONDS)


class Malformed(ValueError):
    """Raised for bytes that encode no message."""


def shape_of(kind: Any, known: dict[str, Shape] | None = None) -> Shape:
    """Return the shape of a message type from its descriptor."""
    known = {} if known is None else known
    if kind.full_name in known:
        return known[kind.full_name]
    shape = known[kind.full_name] = Shape()
    for field in kind.fields:
        tag = field.number << 3 | _BYTES
        if field.message_type is not None:
            shape[tag] = shape_of(field.message_type, known)
        elif field.is_repeated and field.type not in _TEXT:
            width = 1 if field.type in _ONE else 8 if field.type in _EIGHT else 4
            shape[tag] = -width if field.type in _FIXED else width
    return shape


def count(data: bytes, shape: Shape) -> Generator[int, None, int]:
    """Count the bytes that a message takes in memory, its encoded bytes included; yield the sum after every slice.

    Malformed: the bytes are no message. Some errors are found only by parsing.
    """
    total, fields = len(data), 0
    position, end, closing = 0, len(data), 0
    above = list[tuple[Shape, int, int]]()
    try:
        while True:
            if position >= end:
                if position > end or closing:
                    raise Malformed
                if not above:
                    return total + fields * FIELD_BYTES
                shape, end, closing = above.pop()
                continue
            tag = data[position]
            position += 1
            if tag >= 128:
                tag, position = _varint(data, position - 1)
                tag &= 0xFFFF_FFFF
            fields += 1
            if not fields % SLICE_FIELDS:
                yield total + fields * FIELD_BYTES
            kind = tag & 7
            if kind == _BYTES:
                length = data[position]
                position += 1
                if length >= 128:
                    length, position = _varint(data, position - 1)
                inner = shape.get(tag)
                if inner is None:
                    position += length
                elif inner.__class__ is int:
                    total += _packed(data, position, length, inner)
                    position += length
                else:
                    if position + length > end or len(above) >= _DEEPEST:
                        raise Malformed
                    above.append((shape, end, closing))
                    shape, end, closing = cast(Shape, inner), position + length, 0
            elif kind == _VARINT:
                while data[position] >= 128:
                    position += 1
                position += 1
            elif kind == _FIXED64:
                position += 8
            elif kind == _FIXED32:
                position += 4
            elif kind == _GROUP:
                # None of our messages has groups: it is an unknown field with all its contents, up to its end tag.
                if len(above) >= _DEEPEST:
                    raise Malformed
                above.append((shape, end, closing))
                shape, closing = {}, tag + 1
            elif kind == _GROUP_END and tag == closing:
                shape, end, closing = above.pop()
            else:
                raise Malformed
    except IndexError as error:
        raise Malformed from error


def _packed(data: bytes, position: int, length: int, width: int) -> int:
    """Return the bytes counted for a packed field."""
    if width < 0:
        return length * VALUE_WIDTHS
    if position + length > len(data):
        raise Malformed
    if length < _FEW_BYTES:
        values = len(data[position : position + length].translate(None, _CONTINUED))
    else:
        values = int(np.count_nonzero(np.frombuffer(data, np.int8, length, position) >= 0))
    return values * width * VALUE_WIDTHS


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number that begins at a position, and the position behind it."""
    value = 0
    for place in range(_LONGEST_VARINT):
        byte = data[position + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, position + place + 1
    raise Malformed
