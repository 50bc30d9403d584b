"""References of all samples in one arena, and the alignment of each sample to its own reference.

Every token of every sample is compared with its reference between two steps of the engine. So references share an
arena, alignments share a table (see `row`), and the loop is compiled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.generation.drafters.reference.row import (
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
from services.generation.engine.types import EngineSampleState

_ROWS, _TOKENS = 64, 1 << 14
# Form in which an alignment moves to another engine: length of the reference, offset, seen, matched.
_STATE = struct.Struct("<4q")


def warm_up() -> None:
    """Compile or load the compiled functions, so that the first step does not wait for it."""
    alignments = Alignments(np.zeros(2, np.int64))
    alignments.follow("", [1, 2, 3], 0)
    counts = np.zeros((2, 1, 2), np.int64)
    aligned = alignments.compare([EngineSampleState("", [], [1], 1, 1)], *counts)
    alignments.propose(aligned, np.ones((1, 2)), np.zeros((1, 1), np.int32), np.zeros((1, 1)))


class AlignedSamples(NamedTuple):
    """Samples with a reference: their rows, and their places among the samples of the step, [k] each."""

    rows: NDArray[np.int64]
    places: NDArray[np.int64]


class Alignments:
    """Alignments by sample id. Constructing one imports numba."""

    def __init__(self, ramp: NDArray[np.int64]) -> None:
        """`ramp` has the bucket of each number of matches in a row, up to the first of the last bucket but one."""
        from services.generation.drafters.reference import compiled

        self._compiled = compiled
        self._ramp = ramp
        self._rows: dict[str, int] = {}
        self._free = list(range(_ROWS))
        self._table = np.zeros((_ROWS, FIELDS), np.int64)
        self._arena = np.zeros(_TOKENS, np.int32)
        # End of the tokens in the arena, and the number of tokens still in use.
        self._end = self._used = 0

    def __len__(self) -> int:
        return len(self._rows)

    def follow(self, sample_id: str, reference: ArrayLike, source: int) -> None:
        """Set the reference of a sample, aligned at offset 0; it replaces another one."""
        self.forget(sample_id)
        if not self._free:
            self._free = list(range(len(self._table), 2 * len(self._table)))
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        tokens = np.asarray(reference, np.int32)
        begin = self._reserve(len(tokens))
        self._arena[begin : begin + len(tokens)] = tokens
        row = self._rows[sample_id] = self._free.pop()
        self._table[row] = (begin, len(tokens), 0, 0, UNBROKEN, source)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._rows

    def replace(self, sample_id: str, reference: ArrayLike, agreed: int) -> None:
        """Let a sample continue along another reference, whose first `agreed` tokens are its response."""
        source = int(self._table[self._rows[sample_id], SOURCE])
        self.follow(sample_id, reference, source)
        self._table[self._rows[sample_id], SEEN] = agreed

    def mismatched(self, aligned: AlignedSamples) -> NDArray[np.int64]:
        """Return the places of the samples that have ever left their reference, [m]."""
        return aligned.places[self._table[aligned.rows, MATCHED] < UNBROKEN]

    def forget(self, sample_id: str) -> None:
        """Forget the reference of a sample, if it has one."""
        row = self._rows.pop(sample_id, None)
        if row is not None:
            self._used -= int(self._table[row, LENGTH])
            self._free.append(row)

    def state(self, sample_id: str) -> bytes:
        """Return the alignment of a sample without its reference; empty if it has none."""
        row = self._rows.get(sample_id)
        if row is None:
            return b""
        return _STATE.pack(*self._table[row, [LENGTH, OFFSET, SEEN, MATCHED]].tolist())

    def resume(self, sample_id: str, state: bytes) -> None:
        """Continue from `state`, unless it belongs to another reference or is impossible.

        Raise struct.error for bytes of another size. The state is checked because it comes from another process,
        and compiled code addresses memory by it.
        """
        length, offset, seen, matched = _STATE.unpack(state)
        row = self._table[self._rows[sample_id]]
        if length == row[LENGTH] and seen >= 0 and matched >= 0 and -seen <= offset <= length:
            row[OFFSET], row[SEEN], row[MATCHED] = offset, seen, matched

    def compare(
        self, samples: Sequence[EngineSampleState], tried: NDArray[np.int64], kept: NDArray[np.int64]
    ) -> AlignedSamples:
        """Compare the tokens that are new since the last call; return the samples that have a reference.

        Adds to `tried` and `kept` [sources, buckets].
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
                begin = seen if seen < length - LATEST else length - LATEST
                tokens += response[begin:] if begin > 0 else response
            lengths.append(length)
            ends.append(len(tokens))
        self._compiled.compare(
            rows, np.array(lengths, np.int64), np.array(tokens, np.int32), np.array(ends, np.int64),
            self._arena, self._table, self._ramp, tried, kept,
        )  # fmt: skip
        return AlignedSamples(rows, np.array(places, np.int64))

    def propose(
        self,
        aligned: AlignedSamples,
        probabilities: NDArray[np.float64],
        proposed: NDArray[np.int32],
        acceptance: NDArray[np.float64],
    ) -> int:
        """Fill in the next tokens of samples and their acceptance; return the number of samples that have any.

        Args:
            aligned: by `compare`.
            probabilities: of a token to match, [sources, buckets].
            proposed: [n, window], like `acceptance`; rows of other samples are left unchanged.
            acceptance: 0 where there is no token.
        """
        made: int = self._compiled.propose(
            aligned.rows, aligned.places, self._arena, self._table, self._ramp, probabilities, proposed, acceptance
        )  # fmt: skip
        return made

    def sources(self, aligned: AlignedSamples) -> list[int]:
        """Return the source of each sample's reference."""
        found: list[int] = self._table[aligned.rows, SOURCE].tolist()
        return found

    def _reserve(self, tokens: int) -> int:
        """Return a place in the arena with room for `tokens` tokens."""
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
        """Move the tokens in use to the beginning of an arena of this size."""
        arena, end = np.zeros(size, np.int32), 0
        for row in self._rows.values():
            begin, length = self._table[row, BEGIN], self._table[row, LENGTH]
            arena[end : end + length] = self._arena[begin : begin + length]
            self._table[row, BEGIN] = end
            end += int(length)
        self._arena, self._end = arena, end
