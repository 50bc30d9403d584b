"""Chunks of long samples: tokens that are in the journal before their sample ends, and are not written again. Pure.

A chunk is a serialised paceline.v1.Sample with only columns of tokens, tool calls and their answers. The record at
the end of the sample has the rest of these and all other fields. Protobuf merges concatenated messages, so the
chunks followed by the rest are the sample. The last token of an unfinished sample is in no chunk, because another
attempt would sample it again, unless the sample waits for its environment or got the token from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from paceline.columns import TokenBuffer, mismatch, varint
from paceline.internal.v1.rollout_event_pb2 import MergedSample
from paceline.v1 import sample_pb2

# Tag of the field, a message: a length and that number of bytes follow.
_TOKENS = bytes([sample_pb2.Sample.DESCRIPTOR.fields_by_name["tokens"].number << 3 | 2])


@dataclass(frozen=True, slots=True)
class Head:
    """Number of the chunks of a sample, and of their tokens; both 0 for a sample that is written whole.

    `nbytes` is the length of the chunks in the sample's payload, if that is in memory.
    """

    chunks: int = 0
    tokens: int = 0
    nbytes: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.chunks}:{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Parse the result of `str`."""
        chunks, tokens = text.split(":")
        return cls(int(chunks), int(tokens))


WHOLE = Head()
"""Head of a sample without chunks."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Chunk of an unfinished sample: its tokens [begin, end), after `number` earlier chunks."""

    index: int
    number: int
    begin: int
    end: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class PartialSample:
    """Chunks of an unfinished sample, concatenated."""

    index: int
    head: Head
    payload: bytes

    def parse(self) -> sample_pb2.Sample | None:
        """Return the columns of the tokens; None if they do not match the head."""
        try:
            sample = sample_pb2.Sample.FromString(self.payload)
        except DecodeError:
            return None
        tokens, count = sample.tokens, self.head.tokens
        of_versions = sum(run.tokens for run in tokens.versions)
        whole = len(tokens.token_ids) == of_versions == count
        return sample if whole and not mismatch(tokens) else None


def pack(columns: TokenBuffer, begin: int = 0, end: int | None = None) -> bytes:
    """Return the payload of the tokens [begin, end)."""
    packed = columns.serialized(begin, end)
    return b"".join((_TOKENS, varint(len(packed)), packed)) if packed else b""


def whole(payload: bytes) -> bytes:
    """Return a serialised sample with its columns in one message: some implementations of protobuf merge none."""
    return MergedSample.FromString(payload).SerializeToString()
