"""Remove device code for other GPUs from a shared library without moving a byte.

nvcc collects device code in the ELF section `.nv_fatbin`. The section is a row of containers, one for
each translation unit; a container is a header and its entries; an entry is a header and a payload, a
cubin or PTX for one architecture. The driver reads the headers and takes the payload that fits its GPU
best.

`nvprune` refuses shared libraries. `prune` writes zeros over payloads, which compress to nothing, and sets the
architecture of their entries to one that no such GPU loads. All offsets stay, so nothing has to be linked again. A
kernel whose code is gone fails with "no kernel image is available", as on a GPU that was never built for.

Layout, little-endian. Container: u32 magic, u16 version, u16 header size, u64 size of the entries. Entry: u16 kind,
u16, u32 header size, u64 payload size, 12 bytes, u32 architecture at 28, 8 bytes, u64 flags at 40.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SECTION = ".nv_fatbin"
ELSEWHERE = 120
"""Architecture of removed entries: newer than the kept one, so that neither cubin nor PTX fits it."""
CUBIN, PTX = 2, 1
_MAGIC = 0xBA55ED50
_ALIGNED = 8
_LEAST_CONTAINER, _LEAST_ENTRY = 16, 64
_ARCHITECTURE = 28
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_ZSTD = b"\x28\xb5\x2f\xfd"
_COMPRESSED = 0x2000 | 0x8000
"""Flags of a payload in LZ4 or Zstandard."""
_KERNEL = re.compile(rb"_Z[0-9A-Za-z_]{10,6000}")

Data = bytes | bytearray | memoryview


class FatbinError(ValueError):
    """A library that cannot be read. The message has the offset."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Device code for one architecture: the offset of its header, and of its payload."""

    header: int
    kind: int
    architecture: int
    begin: int
    end: int
    compressed: bool


@dataclass(frozen=True, slots=True)
class Container:
    """Entries of one translation unit."""

    entries: tuple[Entry, ...]

    def cubins(self, architecture: int) -> list[Entry]:
        """Return the machine code for an architecture."""
        return [each for each in self.entries if (each.kind, each.architecture) == (CUBIN, architecture)]


@dataclass(frozen=True, slots=True)
class Pruned:
    """Bytes of device code that were kept, and that were zeroed."""

    kept: int = 0
    dropped: int = 0


def section(data: Data, name: str) -> range | None:
    """Return the offsets of a section of an ELF file, or None if it has no such section.

    Raises:
        FatbinError: not a 64-bit little-endian ELF file, or a table that ends outside the file.
    """
    if bytes(data[: len(_ELF64_LITTLE)]) != _ELF64_LITTLE:
        raise FatbinError("offset 0: no 64-bit little-endian ELF file")
    (table,) = _read("<Q", data, 0x28)
    size, count, names = _read("<HHH", data, 0x3A)
    rows = [_read("<IIQQQQIIQQ", data, table + index * size) for index in range(count)]
    if not rows:
        return None
    if names >= count:
        raise FatbinError(f"offset {0x3E}: section {names} of {count} has the names")
    for row in rows:
        begin = rows[names][4] + row[0]
        if bytes(data[begin : begin + len(name) + 1]) == name.encode() + b"\0":
            return _within(data, row[4], row[5], len(data))
    return None


def containers(data: Data) -> list[Container]:
    """Return the containers of a library, none if it has no device code.

    Raises:
        FatbinError: the section has something other than containers and zeros between them.
    """
    place = section(data, SECTION)
    if place is None:
        return []
    found, at = list[Container](), place.start
    while at < place.stop:
        if not any(data[at : min(at + _ALIGNED, place.stop)]):
            at += _ALIGNED
            continue
        magic, version, header, size = _read("<IHHQ", data, at)
        if (magic, version) != (_MAGIC, 1):
            raise FatbinError(f"offset {at}: neither a container of version 1 nor padding")
        if header < _LEAST_CONTAINER:
            raise FatbinError(f"offset {at}: header of {header} bytes, at least {_LEAST_CONTAINER} expected")
        inside = _within(data, at + header, size, place.stop)
        found.append(Container(tuple(_entries(data, inside))))
        at = inside.stop
    return found


def _entries(data: Data, place: range) -> list[Entry]:
    found, at = list[Entry](), place.start
    while at < place.stop:
        kind, _, header, size = _read("<HHIQ", data, at)
        if header < _LEAST_ENTRY:
            raise FatbinError(f"offset {at}: header of {header} bytes, at least {_LEAST_ENTRY} expected")
        payload = _within(data, at + header, size, place.stop)
        (architecture,) = _read("<I", data, at + _ARCHITECTURE)
        (flags,) = _read("<Q", data, at + 40)
        compressed = bool(flags & _COMPRESSED) or bytes(data[payload.start : payload.start + 4]) == _ZSTD
        found.append(Entry(at, kind, architecture, payload.start, payload.stop, compressed))
        at = payload.stop
    return found


def kernel_names(data: Data, container: Container, architecture: int) -> set[str]:
    """Return the mangled C++ names in a container's machine code for an architecture, kernels among them.

    Raises:
        FatbinError: the machine code is compressed, so that no names can be read.
    """
    found = set[str]()
    for entry in container.cubins(architecture):
        if entry.compressed:
            raise FatbinError(f"offset {entry.header}: compressed; its kernels cannot be told apart")
        found.update(name.decode() for name in _KERNEL.findall(bytes(data[entry.begin : entry.end])))
    return found


def prune(
    data: bytearray,
    found: Sequence[Container],
    architecture: int,
    wanted: Callable[[Container], bool] = lambda _: True,
) -> Pruned:
    """Keep the machine code for an architecture, of the wanted containers; zero all other device code in place."""
    kept = dropped = 0
    for container in found:
        cubins = container.cubins(architecture) if wanted(container) else []
        for entry in container.entries:
            size = entry.end - entry.begin
            if entry in cubins:
                kept += size
                continue
            dropped += size
            data[entry.begin : entry.end] = bytes(size)
            # This GPU would not load entries for later GPUs; they stay unchanged.
            if entry.architecture <= architecture:
                struct.pack_into("<I", data, entry.header + _ARCHITECTURE, ELSEWHERE)
    return Pruned(kept, dropped)


def _within(data: Data, begin: int, size: int, stop: int) -> range:
    if begin + size > min(stop, len(data)):
        raise FatbinError(f"offset {begin}: {size} bytes end behind offset {min(stop, len(data))}")
    return range(begin, begin + size)


def _read(layout: str, data: Data, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(layout, data, at)
    except (struct.error, OverflowError) as error:
        raise FatbinError(f"offset {at}: the file ends within a header") from error
