"""Chunks of long samples: tokens that are in the journal before their sample ends, and are not written again.

A chunk is a serialised paceline.v1.Sample with nothing but tokens and log-probabilities. What is written when the
sample ends has the rest of the tokens and all other fields. Protobuf merges messages that follow one another, so
chunks and rest in one string are the sample. The last token of an unfinished sample is in no chunk, because another
attempt would sample it again. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from paceline.v1 import sample_pb2


@dataclass(frozen=True, slots=True)
class Head:
    """Number of the chunks of a sample, and of their tokens; none of either for one that is written whole.

    `nbytes` is their length in the sample's payload, where that is in memory.
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
    """Chunk of an unfinished sample: its tokens [begin, end), after `number` chunks before."""

    index: int
    number: int
    begin: int
    end: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class PartialSample:
    """Chunks of an unfinished sample, one after the other."""

    index: int
    head: Head
    payload: bytes

    def parse(self) -> sample_pb2.Sample | None:
        """Return the tokens and log-probabilities; None if they are not those that the head promises."""
        try:
            sample = sample_pb2.Sample.FromString(self.payload)
        except DecodeError:
            return None
        whole = len(sample.token_ids) == len(sample.logprobs) == self.head.tokens
        return sample if whole else None


def pack(tokens: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """Return the payload of a chunk."""
    return sample_pb2.Sample(token_ids=tokens, logprobs=logprobs).SerializeToString()
