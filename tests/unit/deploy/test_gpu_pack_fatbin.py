"""Device code for other GPUs becomes zeros, and nothing else of a library changes."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.gpu_pack.fatbin import ELSEWHERE, FatbinError, Pruned, containers, kernel_names, prune, section
from tests.support.fatbins import COMPRESSED, CUBIN, PTX, Code, container, library

CODES = st.builds(
    Code,
    kind=st.sampled_from([CUBIN, PTX, 8]),
    architecture=st.sampled_from([75, 80, 89, 90, 100, 120]),
    payload=st.binary(min_size=1, max_size=9).map(lambda each: each.ljust(16, b"\1")),
    flags=st.sampled_from([0x11, 0x11 | COMPRESSED]),
    header=st.sampled_from([64, 80, 112]),
)
CONTAINERS = st.lists(st.lists(CODES, max_size=4), max_size=4)
PADDING = bytes(24)


def joined(found: list[list[Code]]) -> bytes:
    return library(PADDING.join(container(each) for each in found))


@given(CONTAINERS)
def test_only_cubins_for_the_gpu_stay_and_no_byte_moves(found: list[list[Code]]) -> None:
    data = joined(found)
    pruned = bytearray(data)
    said = prune(pruned, containers(data), 90)
    codes = [code for each in found for code in each]
    kept = [code for code in codes if (code.kind, code.architecture) == (CUBIN, 90)]
    assert said == Pruned(16 * len(kept), 16 * (len(codes) - len(kept)))

    expected = bytearray(data)
    for code, entry in zip(codes, (e for c in containers(data) for e in c.entries), strict=True):
        assert data[entry.begin : entry.end] == code.payload
        if code not in kept:
            expected[entry.begin : entry.end] = bytes(16)
            if code.architecture <= 90:
                expected[entry.header + 28 : entry.header + 32] = struct.pack("<I", ELSEWHERE)
    assert pruned == expected

    # What is left is a library still, which has no more to lose.
    again = bytearray(pruned)
    prune(again, containers(again), 90)
    assert again == pruned


@given(CONTAINERS, st.integers(0, 3))
def test_containers_that_are_not_wanted_go_whole(found: list[list[Code]], wanted: int) -> None:
    data = joined(found)
    pruned = bytearray(data)
    parsed = containers(data)
    said = prune(pruned, parsed, 90, lambda each: each is parsed[wanted] if wanted < len(parsed) else False)
    mine = found[wanted] if wanted < len(found) else []
    assert said.kept == 16 * sum((code.kind, code.architecture) == (CUBIN, 90) for code in mine)


@given(CONTAINERS, st.data())
def test_damage_is_told_or_harmless(found: list[list[Code]], draw: st.DataObject) -> None:
    data = bytearray(joined(found))
    if draw.draw(st.booleans()):
        del data[draw.draw(st.integers(0, len(data) - 1)) :]
    else:
        at = draw.draw(st.integers(0, len(data) - 8))
        struct.pack_into("<Q", data, at, draw.draw(st.integers(0, 2**64 - 1)))
    before = len(data)
    # Any other error would fail the test.
    with suppress(FatbinError):
        prune(data, containers(data), 90)
    assert len(data) == before


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "offset 0: no 64-bit little-endian ELF file"),
        (b"\x7fELF\x01\x01" + bytes(80), "offset 0: no 64-bit little-endian ELF file"),
        (library(b"device code that is none"), "neither a container of version 1 nor padding"),
        (library(container([Code(CUBIN, 90, b"code")])[:-1]), "bytes end behind offset"),
        (library(container([Code(CUBIN, 90, b"code", header=32 + 16)])), "header of 48 bytes, at least 64"),
    ],
)
def test_errors_have_the_offset(data: bytes, said: str) -> None:
    with pytest.raises(FatbinError, match=r"^offset \d+: ") as caught:
        containers(data)
    assert said in str(caught.value)


def test_a_library_may_have_no_device_code() -> None:
    data = library(None)
    assert containers(data) == []
    place = section(data, ".text")
    assert place is not None
    assert data[place.start : place.stop] == b"host code"


def test_names_of_kernels_are_those_of_the_machine_code_for_the_gpu() -> None:
    name, other = b"_ZN5flash7forwardEv", b"_ZN5flash8backwardEv"
    data = library(container([Code(CUBIN, 90, b"\0" + name + b"\0"), Code(CUBIN, 80, other)]))
    (only,) = containers(data)
    assert kernel_names(data, only, 90) == {name.decode()}


@pytest.mark.parametrize("code", [Code(CUBIN, 90, b"...", 0x8011), Code(CUBIN, 90, b"\x28\xb5\x2f\xfd...")])
def test_names_in_compressed_code_are_not_guessed(code: Code) -> None:
    data = library(container([code]))
    (only,) = containers(data)
    with pytest.raises(FatbinError, match="compressed"):
        kernel_names(data, only, 90)
