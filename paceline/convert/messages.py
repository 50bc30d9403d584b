"""Make messages of requests: each value is converted by the type that its field has in the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline.convert import values

M = TypeVar("M", bound=Message)
R = TypeVar("R")
Convert = Callable[[Any, str], Any]

_KINDS = FieldDescriptor
_RANGES = {
    _KINDS.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _KINDS.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _KINDS.CPPTYPE_UINT32: values.UINT32,
    _KINDS.CPPTYPE_UINT64: values.UINT64,
}
_FLOATS = (_KINDS.CPPTYPE_DOUBLE, _KINDS.CPPTYPE_FLOAT)


def message(kind: type[M], at: str = "", /, **given: Any) -> M:
    """Return a message with these fields; `at` is the path of the message in the request.

    None leaves a field unset that can be. Messages and enums are given as they are.

    Raises:
        InvalidArgumentError: a value is not of its field's type; its violation has the path of the field.
    """
    fields = _fields(cast(Any, kind))
    converted = {}
    for name, value in given.items():
        optional, convert = fields[name]
        if value is not None or not optional:
            converted[name] = convert(value, f"{at}.{name}" if at else name)
    return kind(**converted)


def record(value: Any, kind: type[R], at: str) -> R:
    """Return a value that must be one of the SDK's records."""
    if not isinstance(value, kind):
        values.refuse(at, value, f"must be a paceline.{kind.__name__}")
    return value


@lru_cache(maxsize=64)
def _fields(kind: Any) -> Mapping[str, tuple[bool, Convert]]:
    """Return for each field whether it may be unset, and how its values are converted."""
    fields: Mapping[str, Any] = kind.DESCRIPTOR.fields_by_name
    return {name: (field.has_presence, _converter(field)) for name, field in fields.items()}


def _converter(field: FieldDescriptor) -> Convert:
    kind, several = field.cpp_type, field.is_repeated
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return values.names
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return partial(values.integers if several else values.integer, low=low, high=high)
    if kind in _FLOATS:
        return values.reals if several else values.number
    if kind == _KINDS.CPPTYPE_STRING:
        return values.texts if several else values.text
    if kind == _KINDS.CPPTYPE_BOOL:
        return values.flag
    if several or field.message_type is None:
        return _as_it_is
    return partial(_message_of, kind=field.message_type.full_name)


def _as_it_is(value: Any, field: str) -> Any:
    return value


def _message_of(value: Any, field: str, kind: str) -> Any:
    if not isinstance(value, Message) or value.DESCRIPTOR.full_name != kind:
        values.refuse(field, value, f"must be a {kind}")
    return value
