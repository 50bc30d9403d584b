"""Chunks of long samples: tokens that are in the journal before their sample ends, and are not written again.

A chunk is a serialised paceline.v1.Sample with nothing but tokens, log-probabilities and version spans. What is
written when the sample ends has the rest of the tokens, all version spans and all other fields. Protobuf merges
messages that follow one another, so chunks and rest in one string are the sample, but for its spans: see
`join_spans`. The last token of an unfinished sample is in no chunk, because another attempt would sample it again.
Pure.
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
        join_spans(sample)
        whole = len(sample.token_ids) == len(sample.logprobs) == self.head.tokens
        return sample if whole else None


def pack(
    tokens: Sequence[int], logprobs: Sequence[float], spans: Sequence[sample_pb2.VersionSpan] = ()
) -> bytes:
    """Return the payload of a chunk."""
    return sample_pb2.Sample(token_ids=tokens, logprobs=logprobs, version_spans=spans).SerializeToString()


def join_spans(sample: sample_pb2.Sample) -> None:
    """Join the version spans of chunks, of which each brings its own; one that begins at 0 is the first of all."""
    spans = [(span.begin, span.end, span.policy_version) for span in sample.version_spans]
    joined: list[tuple[int, int, int]] = []
    for begin, end, version in spans:
        if begin == 0:
            joined.clear()
        if joined and joined[-1][1:] == (begin, version):
            joined[-1] = (joined[-1][0], end, version)
        else:
            joined.append((begin, end, version))
    if joined != spans:
        del sample.version_spans[:]
        for begin, end, version in joined:
            sample.version_spans.add(begin=begin, end=end, policy_version=version)
