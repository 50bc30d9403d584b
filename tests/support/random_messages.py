"""Random messages of the protocol: built from descriptors, with the values at which code tends to break."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_NEAR = (0, 1, 2, 3, 7, 40, 511, 512, 1000, 65_536, 2**31 - 1, 2**31, 2**53, -1, -2, -(2**31))
_REAL = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 1e-300, 3e38, 1e308, math.inf, -math.inf, math.nan)
_STRINGS = (
    "",
    " ",
    "a",
    ":",
    "{x}",
    "*",
    "..",
    "/etc/passwd",
    "a\x00b",
    "\n",
    "\u202e",
    "\U0001f642",
    "0",
    "-1",
)
_COUNTS = (0, 1, 1, 2, 3, 40)
_DEEPEST = 5


class RandomMessages:
    """Source of random messages. Strings are often one of `names`, which may grow."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self.draw = random.Random(seed)
        self.names = names

    def build(self, descriptor: Descriptor) -> Message:
        """Return a message with random fields."""
        message: Message = descriptor._concrete_class()
        self._fill(message, _DEEPEST)
        return message

    def mutate(self, template: Message) -> Message:
        """Return a copy in which one field, or a few, somewhere in it, are random."""
        message = type(template)()
        message.CopyFrom(template)
        for _ in range(self.draw.choice((1, 1, 1, 2, 4))):
            target = self._somewhere(message)
            if target.DESCRIPTOR.fields:
                self._set(target, self.draw.choice(target.DESCRIPTOR.fields), _DEEPEST)
        return message

    def damage(self, payload: bytes) -> bytes:
        """Return bytes that most likely are no message: cut, changed or made up."""
        changed = bytearray(payload or self.draw.randbytes(20))
        for _ in range(self.draw.randrange(1, 4)):
            changed[self.draw.randrange(len(changed))] = self.draw.randrange(256)
        return bytes(changed[: self.draw.randrange(1, len(changed) + 1)])

    def _somewhere(self, message: Message) -> Message:
        inner = [
            each
            for field, value in message.ListFields()
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and not _is_map(field)
            for each in (value if field.is_repeated else [value])
        ]
        return self._somewhere(self.draw.choice(inner)) if inner and self.draw.random() < 0.6 else message

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self.draw.random() < 0.7:
                self._set(message, field, depth)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        message.ClearField(field.name)
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            self._set_message(message, field, depth)
        elif field.is_repeated:
            one = self._scalar(field)
            getattr(message, field.name).extend(one() for _ in range(self.draw.choice(_COUNTS)))
        elif self.draw.random() < 0.9:
            setattr(message, field.name, self._scalar(field)())

    def _set_message(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if depth == 0:
            return
        if _is_map(field):
            entries = getattr(message, field.name)
            if field.message_type.fields_by_name["value"].message_type is None:
                return
            self._fill(entries[self._string()], depth - 1)
        elif field.is_repeated:
            for _ in range(self.draw.choice(_COUNTS)):
                self._fill(getattr(message, field.name).add(), depth - 1)
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self._fill(inner, depth - 1)

    def _scalar(self, field: FieldDescriptor) -> Callable[[], Any]:
        """Return a source of values for a field."""
        kind = field.cpp_type
        if kind in _INTEGERS:
            low, high = _INTEGERS[kind]
            return lambda: self._integer(low, high)
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return lambda: self.draw.choice((*_REAL, self.draw.random(), self.draw.gauss(0, 100)))
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return lambda: self.draw.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            known = [each.number for each in field.enum_type.values]
            return lambda: self.draw.choice((*known, 99, -1, 2**31 - 1))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return lambda: self.draw.randbytes(self.draw.choice((0, 1, 40, 5000)))
        return self._string

    def _integer(self, low: int, high: int) -> int:
        value = self.draw.choice(
            (*_NEAR, low, high, high - 1, self.draw.randint(low, high), self.draw.randrange(64))
        )
        return min(max(value, low), high)

    def _string(self) -> str:
        chance = self.draw.random()
        if chance < 0.6:
            return self.draw.choice(self.names)
        if chance < 0.95:
            return self.draw.choice(_STRINGS)
        return self.draw.choice("xé\U0001f642") * self.draw.choice((64, 300, 70_000))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
