"""Chunks of long samples: tokens that are in the journal before their sample ends, and are not written again. Pure.

A chunk is a serialised paceline.v1.Sample with only tokens, log-probabilities, version spans, tool calls and their
answers. The record at the end of the sample has the rest of these, all version spans and all other fields. Protobuf
merges concatenated messages, so the chunks followed by the rest are the sample, except for its spans: see
`join_spans`. The last token of an unfinished sample is in no chunk, because another attempt would sample it again,
unless the sample waits for its environment or got the token from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from paceline.internal.v1.rollout_event_pb2 import SerializedSpans
from paceline.v1 import sample_pb2
from services.gateway.state.sample import TokenColumns

# Tags of the fields, which are all packed: a length and that number of bytes follow.
_TOKEN_IDS, _LOGPROBS, _TOP_TOKEN_IDS, _TOP_LOGPROBS = (
    bytes([sample_pb2.Sample.DESCRIPTOR.fields_by_name[name].number << 3 | 2])
    for name in ("token_ids", "logprobs", "top_token_ids", "top_logprobs")
)


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
        """Return the tokens and log-probabilities; None if they do not match the head."""
        try:
            sample = sample_pb2.Sample.FromString(self.payload)
        except DecodeError:
            return None
        join_spans(sample)
        whole = len(sample.token_ids) == len(sample.logprobs) == self.head.tokens
        surplus = len(sample.top_token_ids) % max(1, self.head.tokens)
        whole = whole and not surplus and len(sample.top_token_ids) == len(sample.top_logprobs)
        return sample if whole else None


def pack(columns: TokenColumns, spans: Sequence[sample_pb2.VersionSpan] = ()) -> bytes:
    """Return the payload of a chunk, of uint32 tokens and float32 log-probabilities.

    For long responses this is five times as fast as protobuf, which takes numbers one by one. All tokens get the
    same number of bytes, as the format allows.
    """
    if not columns.tokens:
        return b""
    parts = [*_packed(_TOKEN_IDS, columns.tokens), *_packed(_LOGPROBS, columns.logprobs)]
    if columns.top_tokens:
        parts += _packed(_TOP_TOKEN_IDS, columns.top_tokens)
        parts += _packed(_TOP_LOGPROBS, columns.top_logprobs)
    if spans:
        parts.append(sample_pb2.Sample(version_spans=spans).SerializeToString())
    return b"".join(parts)


def _packed(tag: bytes, values: array[int] | array[float]) -> tuple[bytes, bytes, bytes]:
    packed = _varints(np.frombuffer(values, np.uint32)) if values.typecode == "I" else values.tobytes()
    return tag, _length(packed), packed


def _varints(numbers: npt.NDArray[np.uint32]) -> bytes:
    if numbers.max() < 1 << 21:
        # Seven bits a byte; the top bit marks a byte that is followed by another.
        spread = numbers & 0x7F | (numbers & 0x3F80) << 1 | (numbers & 0x1FC000) << 2 | 0x8080
        return spread.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    bits = (numbers[:, None] >> np.arange(0, 35, 7, np.uint32)).astype(np.uint8) & 0x7F
    bits[:, :-1] |= 0x80
    return bits.tobytes()


def _length(field: bytes) -> bytes:
    rest, encoded = len(field), bytearray()
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


def whole(payload: bytes) -> bytes:
    """Return the serialised sample with its version spans joined, without parsing its other fields."""
    spans = SerializedSpans.FromString(payload)
    return spans.SerializeToString() if join_spans(spans) else payload


def join_spans(sample: sample_pb2.Sample | SerializedSpans) -> bool:
    """Join the version spans of chunks, each of which has its own; return False if they are joined already.

    A span that begins at 0 starts a new list and replaces all earlier spans.
    """
    spans = [(span.begin, span.end, span.policy_version, span.mixed_kv) for span in sample.version_spans]
    joined: list[tuple[int, int, int, bool]] = []
    for begin, end, version, mixed in spans:
        if begin == 0:
            joined.clear()
        if joined and joined[-1][1:] == (begin, version, mixed):
            joined[-1] = (joined[-1][0], end, version, mixed)
        else:
            joined.append((begin, end, version, mixed))
    if joined == spans:
        return False
    del sample.version_spans[:]
    for begin, end, version, mixed in joined:
        sample.version_spans.add(begin=begin, end=end, policy_version=version, mixed_kv=mixed)
    return True
