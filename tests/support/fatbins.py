"""Small shared libraries with device code, laid out as nvcc lays it out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

CUBIN, PTX = 2, 1
COMPRESSED = 0x8000


@dataclass(frozen=True)
class Code:
    """An entry: what it is, for which architecture, its bytes, and those of its header."""

    kind: int
    architecture: int
    payload: bytes
    flags: int = 0x11
    header: int = 64


def container(entries: Sequence[Code]) -> bytes:
    """Return a container of entries."""
    written = b"".join(map(_entry, entries))
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(written)) + written


def _entry(code: Code) -> bytes:
    header = bytearray(code.header)
    struct.pack_into("<HHIQ", header, 0, code.kind, 0x101, code.header, len(code.payload))
    struct.pack_into("<I", header, 28, code.architecture)
    struct.pack_into("<Q", header, 40, code.flags)
    return bytes(header) + code.payload


def library(device_code: bytes | None, before: bytes = b"host code") -> bytes:
    """Return an ELF file with host code, and with a section of device code if there is any."""
    sections = [(b"", b""), (b".text", before), (b".nv_fatbin", device_code)]
    sections = [(name, content) for name, content in sections if content is not None]
    names = b"\0".join([*(name for name, _ in sections), b".shstrtab", b""])
    sections.append((b".shstrtab", names))
    body, rows = bytearray(64), bytearray()
    for name, content in sections:
        body += bytes(-len(body) % 8)
        offset = names.index(name + b"\0")
        rows += struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, len(body), len(content), 0, 0, 8, 0)
        body += content
    body += bytes(-len(body) % 8)
    body[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(sections), len(sections) - 1)
    return bytes(body + rows)
