"""The count of a message's memory on its bytes, against what protobuf makes of them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.v1 import rollout_pb2
from services.platform.grpc.parse_budget import (
    FIELD_BYTES,
    SLICE_FIELDS,
    VALUE_WIDTHS,
    Malformed,
    count,
    shape_of,
)

Descriptor = Any
"""The stubs have two of them."""

ROOT = Path(__file__).parents[3]
PROTOS = sorted(path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto"))
FILES: list[FileDescriptor] = [
    import_module(f"{'.'.join(path.with_suffix('').parts)}_pb2").DESCRIPTOR for path in PROTOS
]
REQUESTS: list[Descriptor] = list(
    {
        method.input_type.full_name: method.input_type
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    }.values()
)


def counted(data: bytes, kind: Descriptor) -> int:
    counting = count(data, shape_of(kind))
    while True:
        try:
            next(counting)
        except StopIteration as last:
            return int(last.value)


def parsed(data: bytes, kind: Descriptor) -> Message:
    return message_factory.GetMessageClass(kind).FromString(data)


def is_text(field: FieldDescriptor) -> bool:
    return field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def in_memory(message: Message) -> int:
    """Count a parsed message as `count` does its bytes, which are those that protobuf writes."""
    total = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            # Of an entry, key and value are written even where they are 0.
            total += len(value) * 3 * FIELD_BYTES
            total += sum(in_memory(value[key]) for key in value) if entry.message_type is not None else 0
        elif field.message_type is not None:
            inner = list(value) if field.is_repeated else [value]
            total += sum(FIELD_BYTES + in_memory(each) for each in inner)
        elif field.is_repeated and not is_text(field):
            width = {"bool": 1}.get(type(value[0]).__name__) or (8 if field.cpp_type in _LONG else 4)
            total += FIELD_BYTES + len(value) * width * VALUE_WIDTHS
        else:
            total += FIELD_BYTES * (len(value) if field.is_repeated else 1)
    return total


_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_DOUBLE)
_NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 3),
}


def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=200)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(st.characters(codec="utf-8"), max_size=200)
    return _NUMBERS[field.cpp_type]


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor) -> Message:
    message = message_factory.GetMessageClass(kind)()
    for field in draw(st.lists(st.sampled_from(list(kind.fields)), unique=True)) if kind.fields else []:
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for each in draw(st.lists(values_of(key), max_size=4)):
                if value.message_type is None:
                    target[each] = draw(values_of(value))
                else:
                    target[each].CopyFrom(draw(messages(value.message_type)))
        elif field.message_type is not None:
            made = draw(st.lists(messages(field.message_type), min_size=1, max_size=3))
            if field.is_repeated:
                target.extend(made)
            else:
                target.CopyFrom(made[0])
        elif field.is_repeated:
            target.extend(draw(st.lists(values_of(field), max_size=40)))
        else:
            setattr(message, field.name, draw(values_of(field)))
    return message


kinds = st.sampled_from(REQUESTS)


@settings(max_examples=60)
@given(kinds.flatmap(messages))
def test_what_is_counted_on_the_wire_is_what_a_parse_finds(message: Message) -> None:
    data = message.SerializeToString()
    assert counted(data, message.DESCRIPTOR) == len(data) + in_memory(message)


@settings(max_examples=60)
@given(kinds, st.binary(max_size=300))
def test_no_bytes_are_refused_that_can_be_parsed(kind: Descriptor, data: bytes) -> None:
    malformed_is_never_parsed(data, kind)


@settings(max_examples=60)
@given(st.data())
def test_no_changed_message_is_refused_that_can_be_parsed(data: st.DataObject) -> None:
    message = data.draw(kinds.flatmap(messages))
    changed = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if changed:
            place = data.draw(st.integers(0, len(changed) - 1))
            changed[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    malformed_is_never_parsed(bytes(changed), message.DESCRIPTOR)


def malformed_is_never_parsed(data: bytes, kind: Descriptor) -> None:
    try:
        found = counted(data, kind)
    except Malformed:
        with pytest.raises(DecodeError):
            parsed(data, kind)
        return
    try:
        message = parsed(data, kind)
    except DecodeError:
        return
    # Fields that come twice, empty ones and unknown ones are counted, and are not all there.
    assert found >= len(data) + in_memory(message)


# Forms that take much memory for few bytes, or in which a count may lose its way: type, bytes, fields in them.
GROUP, SUBMIT = rollout_pb2.Group.DESCRIPTOR, rollout_pb2.SubmitRolloutsRequest.DESCRIPTOR
FORMS: dict[str, tuple[Descriptor, bytes, int]] = {
    "empty-messages": (SUBMIT, b"\x2a\x00", 1),
    "nested-messages": (SUBMIT, b"\x2a\x02\x22\x00", 2),
    "unpacked-numbers": (GROUP, b"\x10\x01", 1),
    "packed-one-by-one": (GROUP, b"\x12\x01\x01", 1),
    "empty-packed": (GROUP, b"\x12\x00", 1),
    "overwritten-numbers": (SUBMIT, b"\x18\x01", 1),
    "overwritten-strings": (SUBMIT, b"\x0a\x01r", 1),
    "merged-messages": (SUBMIT, b"\x32\x02\x08\x01", 2),
    "unknown-numbers": (SUBMIT, b"\xf8\x01\x01", 1),
    "unknown-bytes": (SUBMIT, b"\xfa\x01\x02ab", 1),
    "unknown-fixed": (SUBMIT, b"\xfd\x01abcd\xf9\x01abcdefgh", 2),
    "unknown-groups": (SUBMIT, b"\xfb\x01\xfb\x01\x08\x01\xfc\x01\xfc\x01", 5),
    "unknown-in-messages": (SUBMIT, b"\x2a\x03\xf8\x01\x01", 2),
    "tags-written-long": (SUBMIT, b"\xaa\x80\x00\x80\x00", 1),
}


@pytest.mark.parametrize(("kind", "part", "fields"), FORMS.values(), ids=FORMS)
def test_every_field_on_the_wire_counts(kind: Descriptor, part: bytes, fields: int) -> None:
    data = part * 3000
    packed = data.count(b"\x12\x01\x01") * 4 * VALUE_WIDTHS if kind is GROUP else 0
    assert parsed(data, kind) is not None
    assert counted(data, kind) == len(data) + 3000 * fields * FIELD_BYTES + packed


def test_a_long_count_pauses_after_every_slice() -> None:
    data = b"\x2a\x00" * (3 * SLICE_FIELDS)
    assert [each // SLICE_FIELDS for each in count(data, shape_of(SUBMIT))] == [
        (len(data) + number * SLICE_FIELDS * FIELD_BYTES) // SLICE_FIELDS for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("depth", [99, 200, 100_000])
def test_depth_is_bounded(depth: int) -> None:
    nested = b"\xfb\x01" * depth + b"\xfc\x01" * depth
    malformed_is_never_parsed(nested, SUBMIT)
    if depth > 100:
        with pytest.raises(Malformed):
            counted(nested, SUBMIT)


class _Heap(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Heap
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def repeated_fields(kind: Descriptor, seen: set[str]) -> Iterator[tuple[Descriptor, FieldDescriptor]]:
    if kind.full_name in seen:
        return
    seen.add(kind.full_name)
    for field in kind.fields:
        if field.is_repeated:
            yield kind, field
        if field.message_type is not None:
            yield from repeated_fields(field.message_type, seen)


def long_field(field: FieldDescriptor) -> bytes:
    """Return bytes of a field that takes the most memory for them."""
    number, entries = field.number << 3, 5000
    if is_text(field):
        return (_varint(number | 2) + b"\x00") * entries
    if field.message_type is not None:
        return _whole(field, entries)
    width = {FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_FIXED64: 8}.get(
        field.type,
        {FieldDescriptor.CPPTYPE_FLOAT: 4, FieldDescriptor.CPPTYPE_DOUBLE: 8}.get(field.cpp_type, 1),
    )
    # One more than a power of two: the array has just doubled.
    values = (1 << 16) + 1
    return _varint(number | 2) + _varint(values * width) + b"\x00" * (values * width)


def _whole(field: FieldDescriptor, entries: int) -> bytes:
    kind: Descriptor = field.message_type
    if not kind.GetOptions().map_entry or kind.fields_by_name["key"].type != FieldDescriptor.TYPE_STRING:
        return (_varint(field.number << 3 | 2) + b"\x00") * entries
    keys = [b"\x0a\x04%04d" % key for key in range(entries)]
    return b"".join(_varint(field.number << 3 | 2) + b"\x06" + key for key in keys)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def all_repeated() -> list[tuple[Descriptor, FieldDescriptor]]:
    seen = set[str]()
    return [each for kind in REQUESTS for each in repeated_fields(kind, seen)]


@pytest.mark.parametrize(("kind", "field"), all_repeated(), ids=lambda each: each.full_name)
def test_no_message_takes_more_memory_than_is_counted(kind: Descriptor, field: FieldDescriptor) -> None:
    data = long_field(field)
    parsed(data, kind)
    # Nothing else is to come or go meanwhile. To collect first would take a second, after thousands of tests.
    gc.disable()
    try:
        before = heap_bytes()
        message = parsed(data, kind)
        taken = heap_bytes() - before
    finally:
        gc.enable()
    assert message.ByteSize() > 0 or is_text(field)
    assert taken <= counted(data, kind)
