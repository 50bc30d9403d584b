"""The frames of a data connection: a header of fixed length, and a payload. Pure.

    donor                        receiver
    HELLO    id, rank, token ─▶
    KV       tokens, blocks  ─▶              any number of times
    DRAFTERS states          ─▶              at most once, when the sample is frozen
    END                      ─▶
                             ◀─ ANSWER       what was received; or, at any time, that it is over, and why

END asks whether all that was sent has arrived, and can come again after more.
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


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    KV = 2
    DRAFTERS = 3
    END = 4
    ANSWER = 5
    # Where KV takes another way than the connection (see nixl.py).
    READY = 6
    DONE = 7


class BadFrame(ValueError):
    """What arrived is not a frame, or not one that is allowed here."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header. Of KV `begin` and `count` are tokens of the sample; `begin` of an ANSWER is the reason, 0 for none.

    `crc` is the CRC-32 of the payload, `length` bytes; of an ANSWER that of all KV payloads so far.
    """

    kind: Kind
    begin: int = 0
    count: int = 0
    crc: int = 0
    length: int = 0

    def encode(self) -> bytes:
        """`HEADER_BYTES` bytes."""
        return _HEADER.pack(_MAGIC, self.kind, self.begin, self.count, self.crc, self.length)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Frame:
        """Reads `encode`. BadFrame for anything else, and for more text than there may be."""
        try:
            magic, kind, begin, count, crc, length = _HEADER.unpack(data)
            frame = cls(Kind(kind), begin, count, crc, length)
        except (struct.error, ValueError) as error:
            raise BadFrame(f"no frame: {error}") from error
        if magic != _MAGIC:
            raise BadFrame("no frame of this protocol")
        if frame.kind is not Kind.KV and length > MOST_TEXT:
            raise BadFrame(f"{length} bytes in a frame that may have {MOST_TEXT}")
        return frame


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is there: the migration, the rank, and the token that the receiver gave out for it."""

    migration_id: str
    rank: int
    token: bytes

    def encode(self) -> bytes:
        """The payload of a HELLO."""
        name = self.migration_id.encode()
        return _HELLO.pack(self.rank, len(name)) + name + self.token

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Reads `encode`. BadFrame for anything else."""
        try:
            rank, length = _HELLO.unpack_from(data)
            name = data[_HELLO.size : _HELLO.size + length]
            if len(name) != length:
                raise BadFrame("a HELLO that is too short")
            return cls(name.decode(), rank, data[_HELLO.size + length :])
        except (struct.error, UnicodeDecodeError) as error:
            raise BadFrame(f"no HELLO: {error}") from error


def running_crc(so_far: int, payload_crc: int) -> int:
    """The CRC of all payloads, from that of those before and of one more: over the CRCs, not the bytes again."""
    return zlib.crc32(payload_crc.to_bytes(4, "big"), so_far)
