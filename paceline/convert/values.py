"""Convert values from trainers into fields of messages.

Each value is converted by the type of its field in the protocol. The error of a wrong value names the field, the
value and the allowed values.
"""

from __future__ import annotations

import math
import operator
import reprlib
from array import array as unsigned
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, Generic, NoReturn, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline.errors import invalid_argument

UINT32, UINT64 = (0, 2**32 - 1), (0, 2**64 - 1)
"""Ranges of unsigned integers."""
_MOST_SECONDS = 62_135_596_800
"""About two thousand years: the seconds from a Timestamp's minimum, the year 1, to its zero."""
_NOT_NUMBERS = (bool, np.bool_, str, bytes, bytearray, complex)
_NOT_SEQUENCES = (str, bytes, bytearray, memoryview, Mapping, Set)
_IGNORED_LABEL = -100
"""Value that marks labels to be ignored by a loss."""


def integer(value: Any, field: str, low: int, high: int) -> int:
    """Return an integer from `low` to `high`."""
    if type(value) is int and low <= value <= high:
        return value
    value = _detached(value, field)
    whole: int | None = None
    if _is_scalar(value):
        try:
            whole = operator.index(value)
        except TypeError:
            real = _real(value)
            exact = _exact_below(getattr(value, "dtype", np.dtype(np.float64)))
            whole = int(real) if real is not None and real.is_integer() and abs(real) <= exact else None
    if whole is None or not low <= whole <= high:
        refuse(field, value, f"must be an integer from {low} to {high}")
    return whole


def number(value: Any, field: str) -> float:
    """Return a number, which may be infinite or NaN: the service checks its range."""
    value = _detached(value, field)
    real = _real(value) if _is_scalar(value) else None
    if real is None:
        refuse(field, value, "must be a number")
    return real


def finite(value: Any, field: str) -> float:
    """Return a finite number."""
    real = number(value, field)
    if not math.isfinite(real):
        refuse(field, value, "must be a finite number")
    return real


def seconds(value: Any, field: str) -> float:
    """Return seconds in the range of a Duration and a Timestamp."""
    found = finite(value, field)
    if abs(found) > _MOST_SECONDS:
        refuse(field, value, f"must be at most {_MOST_SECONDS} seconds")
    return found


def text(value: Any, field: str) -> str:
    """Return a valid Unicode string."""
    if not isinstance(value, str):
        refuse(field, value, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(field, value, "must be Unicode, without surrogates")
    return str(value)


def flag(value: Any, field: str) -> bool:
    """Return a truth value; 0 and 1 are accepted."""
    if isinstance(value, bool | np.bool_ | int) and value in (0, 1):
        return bool(value)
    refuse(field, value, "must be True or False")


def texts(value: Any, field: str) -> list[str]:
    """Return a list of strings; a single string is accepted."""
    if isinstance(value, str):
        return [text(value, field)]
    return [text(each, f"{field}[{n}]") for n, each in enumerate(items(value, field, "strings"))]


def names(value: Any, field: str) -> dict[str, str]:
    """Return a mapping of strings to strings."""
    if not isinstance(value, Mapping):
        refuse(field, value, "must be a mapping of strings to strings")
    return {text(key, field): text(each, f"{field}[{key!r}]") for key, each in value.items()}


def integers(value: Any, field: str, low: int, high: int) -> list[int]:
    """Return a list of integers; the shape [1, n] is accepted, as tokenizers return it."""
    if (low, high) == UINT32 and type(value) in (list, tuple) and (not value or type(value[0]) is int):
        # The fast way for token ids; other values are checked below.
        with suppress(TypeError, OverflowError):
            return unsigned("I", value).tolist()
    row = items(_detached(value, field), field, "integers")
    array = _numbers(row)
    if array is not None:
        if array.ndim != 1 and not (array.ndim == 2 and array.shape[0] == 1):
            shape = list(array.shape)
            _invalid(field, f"has the shape {shape}; must be a row of integers, [n] or [1, n]")
        array = array.reshape(-1)
        if not array.size:
            return []
        least, most = array.min(), min(high, _exact_below(array.dtype))
        whole_ones = array.dtype.kind != "f" or bool((array == np.trunc(array)).all())
        if whole_ones and low <= least and array.max() <= most:
            whole: list[int] = array.astype(np.int64).tolist()
            return whole
        row = array
    return [integer(each, f"{field}[{n}]", low, high) for n, each in enumerate(row)]


def reals(value: Any, field: str) -> list[float]:
    """Return a list of numbers."""
    return [number(each, f"{field}[{n}]") for n, each in enumerate(items(_detached(value, field), field))]


def items(value: Any, field: str, of: str = "numbers") -> Any:
    """Return an array, list or tuple as it is, and the items of any other iterable as a list."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if isinstance(value, _NOT_SEQUENCES) or not isinstance(value, Iterable) or isinstance(value, np.ndarray):
        refuse(field, value, f"must be a sequence of {of}")
    return value if isinstance(value, list | tuple) else list(value)


def refuse(field: str, value: Any, allowed: str) -> NoReturn:
    """Raise the error of a value; `allowed` describes the allowed ones."""
    hint = ""
    if isinstance(value, int | np.integer) and value == _IGNORED_LABEL:
        hint = "; this value marks labels that a loss ignores: leave it out"
    _invalid(field, f"{_shown(value)} {allowed}{hint}")


def _invalid(field: str, description: str) -> NoReturn:
    raise invalid_argument({field: description})


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return reprlib.repr(value.item() if isinstance(value, np.generic) else value)
    shape = getattr(value, "shape", None)
    described = f" of the shape {list(shape)}" if isinstance(shape, tuple) else ""
    return f"a value of the type {type(value).__name__}{described}"


def _detached(value: Any, field: str) -> Any:
    """Return a tensor as an array, and any other value as it is."""
    if not hasattr(value, "detach"):
        return value
    try:
        return value.detach().cpu().numpy()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        _invalid(field, f"is a tensor whose values cannot be read: {error}")


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, _NOT_NUMBERS) and getattr(value, "ndim", 0) == 0


def _real(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _exact_below(dtype: np.dtype[Any]) -> float:
    """Return the bound up to which a type represents every integer exactly."""
    return 2.0 ** (np.finfo(dtype).nmant + 1) if dtype.kind == "f" else math.inf


def _numbers(row: Any) -> np.ndarray[Any, Any] | None:
    """Return integers or floats as an array; None for other values."""
    try:
        array = np.asarray(row)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return array if array.dtype.kind in "iuf" else None


E = TypeVar("E", bound=StrEnum)


class EnumPair(Generic[E]):
    """Mapping between an enum of the SDK and its counterpart in the protocol."""

    def __init__(self, kind: type[E], wrapper: Any, prefix: str) -> None:
        pairs = {name.removeprefix(f"{prefix}_"): number for name, number in wrapper.items()}
        self._numbers = {member: pairs[member.name] for member in kind}
        self._members = {number: member for member, number in self._numbers.items()}
        self._unknown = kind.__members__.get("UNSPECIFIED")

    def number(self, member: E, field: str) -> Any:
        """Return the protocol's number of a member, or of its value. InvalidArgumentError: there is none."""
        found = self._numbers.get(member) if isinstance(member, str) else None
        if found is None:
            refuse(field, member, f"must be one of {', '.join(repr(each.value) for each in self._numbers)}")
        return found

    def member(self, number: int) -> E:
        """Return the member of a number; UNSPECIFIED for a number that this SDK does not know."""
        member = self._members.get(number, self._unknown)
        assert member is not None, f"no member for {number}"
        return member


M = TypeVar("M", bound=Message)
R = TypeVar("R")
Convert = Callable[[Any, str], Any]

_KINDS = FieldDescriptor
_RANGES = {
    _KINDS.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _KINDS.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _KINDS.CPPTYPE_UINT32: UINT32,
    _KINDS.CPPTYPE_UINT64: UINT64,
}
_FLOATS = (_KINDS.CPPTYPE_DOUBLE, _KINDS.CPPTYPE_FLOAT)


def message(kind: type[M], at: str = "", /, **given: Any) -> M:
    """Return a message with these fields; `at` is the path of the message in the request.

    None leaves an optional field unset. Messages and enums are passed unchanged.

    Raises:
        InvalidArgumentError: a value does not match its field's type; the violation has the path of the field.
    """
    fields = _fields(cast(Any, kind))
    converted = {}
    for name, value in given.items():
        optional, convert = fields[name]
        if value is not None or not optional:
            converted[name] = convert(value, f"{at}.{name}" if at else name) if convert else value
    return kind(**converted)


def record(value: Any, kind: type[R], at: str) -> R:
    """Return a value after a check that it is a record of the type `kind`."""
    if not isinstance(value, kind):
        refuse(at, value, f"must be a paceline.{kind.__name__}")
    return value


@lru_cache(maxsize=64)
def _fields(kind: Any) -> Mapping[str, tuple[bool, Convert | None]]:
    """Return for each field whether it may be unset, and the converter of its values; None: they need none."""
    fields: Mapping[str, Any] = kind.DESCRIPTOR.fields_by_name
    return {name: (field.has_presence, _converter(field)) for name, field in fields.items()}


def _converter(field: FieldDescriptor) -> Convert | None:
    kind, several = field.cpp_type, field.is_repeated
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return names
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return partial(integers if several else integer, low=low, high=high)
    if kind in _FLOATS:
        return reals if several else number
    if kind == _KINDS.CPPTYPE_STRING:
        return texts if several else text
    if kind == _KINDS.CPPTYPE_BOOL:
        return flag
    # Messages and enums are made by the SDK.
    return None
