"""Frames of a data connection: a header of fixed length, and a payload. Pure.

    donor                        receiver
    HELLO    id, rank, token ─▶
    KV       tokens, blocks  ─▶              any number of times
    DRAFTERS states          ─▶              at most once, when the sample is paused
    END                      ─▶
                             ◀─ ANSWER       CRC of what was received; or, at any time, a reason for its end

END asks whether everything so far has arrived; more KV and another END may follow.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("!4sBxxxIIIQ")
_HELLO = struct.Struct("!II")
_MAGIC = b"PKV1"
HEADER_BYTES = _HEADER.size
MOST_TEXT = 1 << 20
"""Longest payload of a frame that is not KV, in bytes."""


class FrameKind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    KV = 2
    DRAFTERS = 3
    END = 4
    ANSWER = 5
    # Used if KV does not travel over the connection (see nixl.py).
    READY = 6
    DONE = 7


class BadFrame(ValueError):
    """Bytes that are no frame, or a frame that is not allowed here."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Header of a frame. In KV, `begin` and `count` are tokens of the sample; in ANSWER, `begin` is a reason or 0.

    `crc` is the CRC-32 of the payload of `length` bytes; in ANSWER, that of all KV payloads so far.
    """

    kind: FrameKind
    begin: int = 0
    count: int = 0
    crc: int = 0
    length: int = 0

    def encode(self) -> bytes:
        """Return the header as `HEADER_BYTES` bytes."""
        return _HEADER.pack(_MAGIC, self.kind, self.begin, self.count, self.crc, self.length)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Frame:
        """Read `encode`. BadFrame for anything else, and for too long a text."""
        try:
            magic, kind, begin, count, crc, length = _HEADER.unpack(data)
            frame = cls(FrameKind(kind), begin, count, crc, length)
        except (struct.error, ValueError) as error:
            raise BadFrame(f"no frame: {error}") from error
        if magic != _MAGIC:
            raise BadFrame("no frame of this protocol")
        if frame.kind is not FrameKind.KV and length > MOST_TEXT:
            raise BadFrame(f"{length} bytes in a frame that may have {MOST_TEXT}")
        return frame


@dataclass(frozen=True, slots=True)
class Hello:
    """Identity of a donor's connection: migration, rank, and the token that the receiver issued for it."""

    migration_id: str
    rank: int
    token: bytes

    def encode(self) -> bytes:
        """Return the payload of a HELLO."""
        name = self.migration_id.encode()
        return _HELLO.pack(self.rank, len(name)) + name + self.token

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Read `encode`. BadFrame for anything else."""
        try:
            rank, length = _HELLO.unpack_from(data)
            name = data[_HELLO.size : _HELLO.size + length]
            if len(name) != length:
                raise BadFrame("a HELLO that is too short")
            return cls(name.decode(), rank, data[_HELLO.size + length :])
        except (struct.error, UnicodeDecodeError) as error:
            raise BadFrame(f"no HELLO: {error}") from error


def running_crc(so_far: int, payload_crc: int) -> int:
    """Return the CRC of all payloads: over the CRC so far and that of one more payload, not over the bytes."""
    return zlib.crc32(payload_crc.to_bytes(4, "big"), so_far)
