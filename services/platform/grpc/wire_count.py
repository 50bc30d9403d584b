"""Count on the bytes of a protobuf message what it will take in memory, before it is parsed.

Two bytes of a message can become an object of a hundred, so its size says little. The count follows the fields of
the message's type, and works for every type: nothing here knows a method.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

FIELD_BYTES = 256
"""Bytes counted for each field: more than protobuf takes for any message of ours, with some for who reads it."""
VALUE_WIDTHS = 4
"""Widths counted for each packed number: arrays grow by doubling, and stay beside what they grew into."""
SLICE_FIELDS = 2048
"""Fields counted at a time, in about a millisecond."""

Shape = dict[int, object]
"""What the fields of a message hold, by their tags: a `Shape`, or the width of numbers that may be packed.

A width is negative for numbers that have it on the wire, too. Other fields take their bytes, and are left out.
"""

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
# Protobuf parses nothing that is nested more than 100 deep.
_DEEPEST = 128
_LONGEST_VARINT = 10
_GOES_ON = bytes(range(128, 256))
# Below, a copy without the bytes that go on is made faster than numpy is called.
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


class Malformed(ValueError):
    """Raised for bytes that no message is encoded as."""


def shape_of(kind: Any, known: dict[str, Shape] | None = None) -> Shape:
    """Return the shape of a type of message, of which this is the descriptor."""
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
    """Count the bytes that a message takes, with those that it is parsed from; yield the sum after every slice.

    Malformed: the bytes are no message. Not all that are none are found; parsing finds the others.
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
                # None of our messages has one: it is unknown with all that is in it, up to its end tag.
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
        values = len(data[position : position + length].translate(None, _GOES_ON))
    else:
        values = int(np.count_nonzero(np.frombuffer(data, np.int8, length, position) >= 0))
    return values * width * VALUE_WIDTHS


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number that begins at a position, and where it ends."""
    value = 0
    for place in range(_LONGEST_VARINT):
        byte = data[position + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, position + place + 1
    raise Malformed
