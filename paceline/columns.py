"""Columns of tokens: the tokens of a response, and what is known of each of them.

A column has one entry for each token, or the same number of entries for each. `COLUMNS` lists them. A further
column is a row of that table, a field of the three classes here, and a field of the message in sample.proto:
whatever extends, cuts, slices, converts, checks or stores tokens goes through the table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.v1 import sample_pb2

TokenIds = npt.NDArray[np.int64]
Logprobs = npt.NDArray[np.float32]


class Column(NamedTuple):
    """A column: its name, the type code of its array in `TokenBuffer`, and its type in `TokenColumns`.

    `counted_by`: the sampling parameter that says how many entries each token has; empty: each has one.
    """

    name: str
    typecode: str
    dtype: type[np.generic]
    counted_by: str = ""


COLUMNS = (
    Column("token_ids", "I", np.int64),
    Column("logprobs", "f", np.float32),
    Column("top_token_ids", "I", np.int64, counted_by="top_logprobs"),
    Column("top_logprobs", "f", np.float32, counted_by="top_logprobs"),
)
"""All columns, named as the fields of `TokenColumns`, `TokenBuffer`, and the message `paceline.v1.TokenColumns`."""

_LONG = 16
"""Entries of a message from which the detour over numpy is faster than taking them one by one."""
_TAGS = {
    column.name: bytes([sample_pb2.TokenColumns.DESCRIPTOR.fields_by_name[column.name].number << 3 | 2])
    for column in COLUMNS
}
"""Tags of the fields, which are all packed: a length and that number of bytes follow."""


class VersionRun(NamedTuple):
    """Consecutive tokens of one policy version, sampled with KV of earlier ones if `mixed_kv`."""

    tokens: int
    policy_version: int
    mixed_kv: bool = False


class VersionMark(NamedTuple):
    """Tokens from `begin` on were sampled by this policy version, with KV of earlier ones if `mixed_kv`."""

    begin: int
    policy_version: int
    mixed_kv: bool = False


class _Run(Protocol):
    """A `VersionRun`, or the message of one."""

    @property
    def tokens(self) -> int: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def mixed_kv(self) -> bool: ...


class ColumnSource(Protocol):
    """Whatever has the columns as attributes: the message, the classes here, a step of the engine."""

    @property
    def token_ids(self) -> Any: ...
    @property
    def logprobs(self) -> Any: ...
    @property
    def top_token_ids(self) -> Any: ...
    @property
    def top_logprobs(self) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Consecutive tokens, and what is known of each of them."""

    token_ids: TokenIds
    """[tokens]."""
    logprobs: Logprobs
    """[tokens], natural logarithms of the tokens' probabilities."""
    top_token_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """[tokens, top_logprobs], the likeliest tokens of each position, the likeliest first."""
    top_logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[tokens, top_logprobs], their log-probabilities, of the same kind as `logprobs`; -inf if fewer tokens can be
    sampled."""


@dataclass(slots=True)
class TokenLists:
    """Tokens of a few engine steps, as lists: of a few entries these are the fastest to extend."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, source: ColumnSource) -> None:
        """Append tokens."""
        # Column by column, because the engine calls it for every sample in every step.
        self.token_ids += source.token_ids
        self.logprobs += source.logprobs
        if source.top_token_ids:
            self.top_token_ids += source.top_token_ids
            self.top_logprobs += source.top_logprobs

    def take(self, version: int | None, *, mixed_kv: bool = False) -> sample_pb2.TokenColumns:
        """Remove all tokens, and return them as tokens of this policy version; None: of none that is named."""
        made = sample_pb2.TokenColumns(**{column.name: getattr(self, column.name) for column in COLUMNS})
        if version is not None:
            made.versions.add(tokens=len(self), policy_version=version, mixed_kv=mixed_kv)
        for column in COLUMNS:
            getattr(self, column.name).clear()
        return made


@dataclass(slots=True)
class TokenBuffer:
    """Tokens that grow: one flat array a column, extended in time proportional to the new tokens."""

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    top_token_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: list[VersionMark] = field(default_factory=list)
    """The versions that sampled the tokens, in order; empty if they are not recorded."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def given(cls, tokens: Sequence[int], top: int) -> TokenBuffer:
        """Return tokens that were not sampled: log-probability 0, themselves the first of `top` top tokens."""
        made = cls(array("I", tokens), array("f", [0.0] * len(tokens)))
        for token in tokens if top else ():
            made.top_token_ids.extend([token, *[0] * (top - 1)])
            made.top_logprobs.extend([0.0, *[float("-inf")] * (top - 1)])
        return made

    @property
    def top(self) -> int:
        """Number of top tokens of each position."""
        return len(self.top_token_ids) // max(1, len(self))

    @property
    def mixed_kv(self) -> bool:
        """True if some tokens were sampled with KV of several versions."""
        return any(mark.mixed_kv for mark in self.versions)

    def extend(self, source: ColumnSource, versions: Iterable[_Run] = ()) -> None:
        """Append tokens that these versions sampled."""
        begin = len(self)
        for run in versions:
            self.stamp(begin, run.policy_version, mixed_kv=run.mixed_kv)
            begin += run.tokens
        for column in COLUMNS:
            values = getattr(source, column.name)
            if isinstance(values, np.ndarray) or len(values) >= _LONG:
                getattr(self, column.name).frombytes(np.asarray(values, column.typecode).tobytes())
            elif values:
                getattr(self, column.name).extend(values)

    def stamp(self, begin: int, version: int, *, mixed_kv: bool = False) -> None:
        """Record that tokens from `begin` on are of this policy version, with KV of earlier ones if `mixed_kv`."""
        # Called for each report of a sample, which seldom begins a run.
        last = self.versions[-1] if self.versions else None
        if last is None or last.policy_version != version or last.mixed_kv != mixed_kv:
            self.versions.append(VersionMark(begin, version, mixed_kv))

    def runs(self, begin: int = 0, end: int | None = None) -> list[VersionRun]:
        """Return the policy versions of the tokens [begin, end)."""
        found, last = list[VersionRun](), len(self) if end is None else end
        for mark in reversed(self.versions):
            first = max(mark.begin, begin)
            if first < last:
                found.append(VersionRun(last - first, mark.policy_version, mark.mixed_kv))
            last = min(mark.begin, last)
        return found[::-1]

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens."""
        cut(self, count)
        if self.versions and self.versions[-1].begin >= count:
            self.versions = [mark for mark in self.versions if mark.begin < count]

    def clear(self) -> None:
        """Drop all tokens."""
        for column in COLUMNS:
            del getattr(self, column.name)[:]
        self.versions.clear()

    def top_rows(self, begin: int = 0) -> Iterator[tuple[list[int], list[float]]]:
        """Yield the top tokens of each position from `begin` on, and their log-probabilities."""
        top = self.top
        for place in range(begin, len(self)):
            here = slice(place * top, (place + 1) * top)
            yield self.top_token_ids[here].tolist(), self.top_logprobs[here].tolist()

    def message(self, begin: int = 0, end: int | None = None) -> sample_pb2.TokenColumns:
        """Return the tokens [begin, end), with their versions."""
        # Protobuf copies lists faster than any other iterable.
        made = sample_pb2.TokenColumns(
            **{name: part.tolist() for name, part in self._parts(begin, end)}  # type: ignore[arg-type]
        )
        for run in self.runs(begin, end):
            made.versions.add(tokens=run.tokens, policy_version=run.policy_version, mixed_kv=run.mixed_kv)
        return made

    def serialized(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the same message as bytes.

        For long responses this is five times as fast as protobuf, which takes numbers one by one. All tokens of a
        column get the same number of bytes, as the format allows.
        """
        parts = list[bytes]()
        for name, values in self._parts(begin, end):
            if values:
                packed = (
                    _varints(np.frombuffer(values, np.uint32)) if values.typecode == "I" else values.tobytes()
                )
                parts += (_TAGS[name], varint(len(packed)), packed)
        if runs := self.runs(begin, end):
            versions = [sample_pb2.VersionRun(**run._asdict()) for run in runs]
            parts.append(sample_pb2.TokenColumns(versions=versions).SerializeToString())
        return b"".join(parts)

    def _parts(self, begin: int, end: int | None) -> Iterator[tuple[str, array[Any]]]:
        have = len(self)
        last = have if end is None else end
        for column in COLUMNS:
            values = getattr(self, column.name)
            each = len(values) // max(1, have)
            yield column.name, values[each * begin : each * last]


def mismatch(message: sample_pb2.TokenColumns, sampling: sample_pb2.SamplingParams | None = None) -> str:
    """Return what is wrong if columns are not all of the same tokens; else empty.

    `sampling` says how many entries each token has; None: any number, which then is the same for all tokens.
    """
    count, widths = len(message.token_ids), {"": 1}
    for column in COLUMNS:
        entries, asked = len(getattr(message, column.name)), column.counted_by
        if asked not in widths:
            widths[asked] = entries // max(1, count) if sampling is None else getattr(sampling, asked)
        if entries != count * widths[asked]:
            return f"{count} tokens with {entries} {column.name}; each token has {widths[asked]} of them"
    versioned = sum(run.tokens for run in message.versions)
    return f"{count} tokens with versions of {versioned}" if versioned not in (0, count) else ""


def cut(source: ColumnSource, count: int) -> None:
    """Keep the first `count` tokens of flat columns that can be changed."""
    have = max(1, len(source.token_ids))
    for column in COLUMNS:
        values = getattr(source, column.name)
        del values[len(values) // have * count :]


def entries_of(source: ColumnSource) -> int:
    """Return the number of tokens, top tokens included. Of a prompt, whose tokens are left out, those scored."""
    return len(source.logprobs) + len(source.top_token_ids)


def arrays_of(message: sample_pb2.TokenColumns) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a message as the fields of a `TokenColumns`."""
    count = len(message.logprobs)
    found = dict[str, npt.NDArray[Any]]()
    for column in COLUMNS:
        values = np.array(getattr(message, column.name), column.dtype)
        several = column.counted_by
        found[column.name] = values.reshape(count, len(values) // max(1, count)) if several else values
    return found


def part_of(source: TokenColumns, begin: int, end: int | None = None) -> dict[str, npt.NDArray[Any]]:
    """Return the tokens [begin, end) as the fields of a `TokenColumns`."""
    return {column.name: getattr(source, column.name)[begin:end] for column in COLUMNS}


def message_bytes(tokens: int, top: int, vocab_size: int) -> int:
    """Return the most bytes of a message of this number of tokens, with `top` top tokens for each."""
    token = len(varint(max(0, vocab_size - 1)))
    return sum(
        tokens * (top if column.counted_by else 1) * (token if column.typecode == "I" else 4)
        for column in COLUMNS
    )


def varint(number: int) -> bytes:
    """Return a number as protobuf encodes it, seven bits a byte."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _varints(numbers: npt.NDArray[np.uint32]) -> bytes:
    if numbers.max() < 1 << 21:
        # Seven bits a byte; the top bit marks a byte that is followed by another.
        spread = numbers & 0x7F | (numbers & 0x3F80) << 1 | (numbers & 0x1FC000) << 2 | 0x8080
        return spread.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    bits = (numbers[:, None] >> np.arange(0, 35, 7, np.uint32)).astype(np.uint8) & 0x7F
    bits[:, :-1] |= 0x80
    return bits.tobytes()
