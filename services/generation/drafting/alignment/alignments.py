"""The sequences that samples follow, side by side, and how each sample lies along its own.

To compare what came with what was expected is work for every token of every sample of every step, between two steps
of the engine. So sequences are in one arena, alignments in one table (see `row`), and the loop is compiled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.generation.drafting.alignment.row import (
    BEGIN,
    FIELDS,
    LATEST,
    LENGTH,
    MATCHED,
    OFFSET,
    SEEN,
    SOURCE,
    UNBROKEN,
)
from services.generation.engine.types import SampleState

_ROWS, _TOKENS = 64, 1 << 14
# Of an alignment that is carried along: length of the sequence, offset, seen, matched.
_STATE = struct.Struct("<4q")


def warm_up() -> None:
    """Compile, or load what was compiled, so that the first step does not pay for it."""
    alignments = Alignments(np.zeros(2, np.int64))
    alignments.follow("", [1, 2, 3], 0)
    counts = np.zeros((2, 1, 2), np.int64)
    followed = alignments.compare([SampleState("", [], [1], 1)], *counts)
    alignments.offer(followed, np.ones((1, 2)), np.zeros((1, 1), np.int32), np.zeros((1, 1)))


class Followed:
    """Samples that follow a sequence: their rows, and their places among those that were asked for. Both [k]."""

    __slots__ = ("places", "rows")

    def __init__(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        self.rows, self.places = rows, places


class Alignments:
    """Alignments by sample id. Making one imports numba."""

    def __init__(self, ramp: NDArray[np.int64]) -> None:
        """`ramp`: the bucket of each number of matches in a row, up to the first of the last bucket but one."""
        from services.generation.drafting.alignment import compiled

        self._compiled = compiled
        self._ramp = ramp
        self._rows: dict[str, int] = {}
        self._free = list(range(_ROWS))
        self._table = np.zeros((_ROWS, FIELDS), np.int64)
        self._arena = np.zeros(_TOKENS, np.int32)
        # Tokens of the arena that are in use or were, and those that are.
        self._end = self._used = 0

    def __len__(self) -> int:
        return len(self._rows)

    def follow(self, sample_id: str, given: ArrayLike, source: int) -> None:
        """The sample follows `given` from its start on; in the place of another one, if it followed that."""
        self.forget(sample_id)
        if not self._free:
            self._free = list(range(len(self._table), 2 * len(self._table)))
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        tokens = np.asarray(given, np.int32)
        begin = self._reserve(len(tokens))
        self._arena[begin : begin + len(tokens)] = tokens
        row = self._rows[sample_id] = self._free.pop()
        self._table[row] = (begin, len(tokens), 0, 0, UNBROKEN, source)

    def forget(self, sample_id: str) -> None:
        """The sample follows nothing."""
        row = self._rows.pop(sample_id, None)
        if row is not None:
            self._used -= int(self._table[row, LENGTH])
            self._free.append(row)

    def state(self, sample_id: str) -> bytes:
        """How a sample lies along its sequence, without that; empty when it follows none."""
        row = self._rows.get(sample_id)
        if row is None:
            return b""
        return _STATE.pack(*self._table[row, [LENGTH, OFFSET, SEEN, MATCHED]].tolist())

    def go_on(self, sample_id: str, state: bytes) -> None:
        """Reads `state`; that of another sequence, or an impossible one, says nothing here. struct.error for none.

        It comes from another process, and compiled code looks up memory by it.
        """
        length, offset, seen, matched = _STATE.unpack(state)
        row = self._table[self._rows[sample_id]]
        if length == row[LENGTH] and seen >= 0 and matched >= 0 and -seen <= offset <= length:
            row[OFFSET], row[SEEN], row[MATCHED] = offset, seen, matched

    def compare(
        self, samples: Sequence[SampleState], tried: NDArray[np.int64], kept: NDArray[np.int64]
    ) -> Followed:
        """Compare the tokens that are new since the last call; those of `samples` that follow a sequence.

        `tried` and `kept`, [sources, buckets], are added to.
        """
        found = [self._rows.get(sample.sample_id, -1) for sample in samples]
        places: Sequence[int] = range(len(found))
        if -1 in found:
            places = [i for i, row in enumerate(found) if row >= 0]
            samples, found = [samples[i] for i in places], [found[i] for i in places]
        rows = np.array(found, np.int64)
        tokens: list[int] = []
        ends, lengths = [0], []
        for sample, seen in zip(samples, self._table[rows, SEEN].tolist(), strict=True):
            response = sample.response
            length = len(response)
            if length != seen:
                tokens += response[max(min(seen, length - LATEST), 0) :]
            lengths.append(length)
            ends.append(len(tokens))
        self._compiled.compare(
            rows, np.array(lengths, np.int64), np.array(tokens, np.int32), np.array(ends, np.int64),
            self._arena, self._table, self._ramp, tried, kept,
        )  # fmt: skip
        return Followed(rows, np.array(places, np.int64))

    def offer(
        self,
        followed: Followed,
        probabilities: NDArray[np.float64],
        offered: NDArray[np.int32],
        acceptance: NDArray[np.float64],
    ) -> int:
        """Fill in the next tokens of samples and how likely each is; the number of those that have any.

        Args:
            followed: of `compare`.
            probabilities: of a token to match, [sources, buckets].
            offered: [n, window], as `acceptance`: rows of other samples are left as they are.
            acceptance: 0 where there is no token.
        """
        made: int = self._compiled.offer(
            followed.rows, followed.places, self._arena, self._table, self._ramp, probabilities, offered, acceptance
        )  # fmt: skip
        return made

    def sources(self, followed: Followed) -> list[int]:
        """The source of each."""
        found: list[int] = self._table[followed.rows, SOURCE].tolist()
        return found

    def _reserve(self, tokens: int) -> int:
        """Where so many tokens can lie in the arena."""
        if self._end + tokens > len(self._arena):
            size = len(self._arena)
            while self._used + tokens > size // 2:
                size *= 2
            self._compact(size)
        begin = self._end
        self._end += tokens
        self._used += tokens
        return begin

    def _compact(self, size: int) -> None:
        """Move what is in use to the beginning of an arena of this size."""
        arena, end = np.zeros(size, np.int32), 0
        for row in self._rows.values():
            begin, length = self._table[row, BEGIN], self._table[row, LENGTH]
            arena[end : end + length] = self._arena[begin : begin + length]
            self._table[row, BEGIN] = end
            end += int(length)
        self._arena, self._end = arena, end
