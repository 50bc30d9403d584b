"""First difference between two requests under one name, for the error that refuses the second. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

_NONE = "unset"


def first_difference(known: Message, asked: Message, passed_over: Sequence[str] = ()) -> tuple[str, str]:
    """Return the path of the first field that differs, and how; both empty if none does.

    Fields are compared in the order of the protocol; those that are `passed_over` at the top are not compared.
    """
    for field in known.DESCRIPTOR.fields:
        if field.name in passed_over:
            continue
        left, right = _value(known, field), _value(asked, field)
        if left == right:
            continue
        if field.is_repeated:
            return _of_rows(left, right, field.name)
        if isinstance(left, Message) and isinstance(right, Message):
            path, how = first_difference(left, right)
            return f"{field.name}.{path}", how
        return field.name, _how(_named(field, left), _named(field, right))
    return "", ""


def _of_rows(left: Any, right: Any, name: str) -> tuple[str, str]:
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one == other:
            continue
        path = f"{name}[{number}]"
        if isinstance(one, Message):
            inner, how = first_difference(one, other)
            return f"{path}.{inner}", how
        return path, _how(one, other)
    return name, f"had {len(left)} items, has {len(right)}"


def _value(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return _NONE
    return getattr(message, field.name)


def _named(field: Any, value: Any) -> Any:
    """Return the name of a number that has one."""
    known = None if field.enum_type is None else field.enum_type.values_by_number.get(value)
    return value if known is None else known.name


def _how(one: Any, other: Any) -> str:
    return f"was {_shown(one)}, is {_shown(other)}"


def _shown(value: Any) -> str:
    return "a message" if isinstance(value, Message) else reprlib.repr(value).replace(f"'{_NONE}'", _NONE)
