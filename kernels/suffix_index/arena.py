"""The memory of an index: arrays that grow as needed up to a bound, and the compiled functions on them.

Importing this module imports numba.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.suffix_index.compiled import entry_points as compiled
from kernels.suffix_index.compiled import tables
from kernels.suffix_index.compiled.layout import (
    CHUNK,
    CURSOR,
    EDGE,
    EDGES,
    EDGES_END,
    ENTRIES,
    FREE,
    FREE_BLOCKS,
    FREE_CHUNK,
    FREE_STATE,
    LACKING,
    MOST_EDGES,
    NOWHERE,
    SCALARS,
    STATE,
    STATES,
    Arrays,
)
from kernels.suffix_index.compiled.prediction import prior_odds
from kernels.suffix_index.compiled.tables import LEAST_SHARED

_GROWTH = 1.5
# Rows of an array when it is first needed.
_FEW = 256
# Most rows of edges for each token. A text needs about half a row, and more than this only if many rollouts
# continue differently after a prompt that repeats one token.
_EDGES_PER_TOKEN = 4
_GENERATION_SHIFT = 32
_ROW_MASK = (1 << _GENERATION_SHIFT) - 1


class Full(Exception):
    """Raised when the arrays are at their largest size and have no room."""


class Arena:
    """Automata of any number of prompts, the texts of growing rollouts, and the shared table.

    max_tokens: most tokens of all automata together, a root counting as one.
    """

    def __init__(self, max_tokens: int) -> None:
        # A token adds two states at most.
        self._most_states = 2 * max_tokens + _FEW
        self._most_edges = min(_EDGES_PER_TOKEN * max_tokens + _FEW, MOST_EDGES)
        self._most_entries = max(LEAST_SHARED, 1 << (2 * max_tokens).bit_length())
        self.arrays = Arrays(
            np.zeros(0, STATE),
            np.zeros(0, EDGE),
            np.zeros(0, CHUNK),
            np.zeros(0, CURSOR),
            np.zeros(LEAST_SHARED, np.uint64),
            np.zeros(_recent_entries(max_tokens), np.uint64),
            prior_odds(),
            np.zeros(SCALARS, np.int64),
        )
        self._free_rows: list[int] = []
        self.arrays.scalars[FREE_CHUNK] = NOWHERE
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def growing_tokens(self) -> int:
        """Tokens of all growing rollouts."""
        return int(self.arrays.cursors["tokens"].sum())

    def new_root(self) -> int:
        """Return an empty automaton: its root, which is also the state where an empty text ends. Full: no room."""
        if self.arrays.scalars[STATES] == len(self.arrays.states):
            self.grow()
        return int(compiled.new_root(self.arrays))

    def extend(self, tokens: NDArray[np.int32], state: int, weight: float, reach: int) -> int:
        """Append to the text that ends at `state`; return its new end. Full: a part may have been appended."""
        done = 0
        while True:
            done, state = compiled.extend_text(self.arrays, tokens, done, state, np.float32(weight), reach)
            if done == len(tokens):
                return int(state)
            self.grow()

    def teach(self, tokens: NDArray[np.int32], hashes: NDArray[np.uint64], hashed: int) -> int:
        """Add a text after `hashes` [HISTORY] and `hashed` to the shared table, and update both."""
        hashed = int(compiled.teach_text(self.arrays, tokens, hashes, hashed))
        self.relieve()
        return hashed

    def release(self, root: int) -> None:
        """Free the automaton of a root."""
        compiled.release(self.arrays, root)

    def clear(self) -> None:
        """Free all automata."""
        states, scalars = self.arrays.states, self.arrays.scalars
        states["length"] = FREE
        scalars[FREE_STATE] = _chain(states, "link", 0, NOWHERE)
        scalars[[STATES, EDGES_END, EDGES]] = 0
        scalars[FREE_BLOCKS:] = NOWHERE

    def open(self, state: int, weight: float, hashes: NDArray[np.uint64], hashed: int) -> int:
        """Open a cursor for an empty text that continues at `state`; return its handle."""
        cursors = self.arrays.cursors
        if not self._free_rows:
            rows = len(cursors)
            cursors.resize(max(_FEW, 2 * rows), refcheck=False)
            self._free_rows.extend(range(len(cursors) - 1, rows - 1, -1))
        row = self._free_rows.pop()
        generation = (int(cursors[row]["generation"]) + 1) & 0x7FFFFFFF
        cursors[row] = (generation, state, 0, NOWHERE, NOWHERE, weight, 0, hashed, hashes)
        return generation << _GENERATION_SHIFT | row

    def close(self, handle: int) -> NDArray[np.int32]:
        """Free a cursor; return its text."""
        text = self.text(handle)
        row = handle & _ROW_MASK
        compiled.discard(self.arrays, row)
        self.arrays.cursors["generation"][row] += 1
        self._free_rows.append(row)
        return text

    def text(self, handle: int) -> NDArray[np.int32]:
        """Return the text of a cursor."""
        row = handle & _ROW_MASK
        text = np.empty(int(self.arrays.cursors[row]["tokens"]), np.int32)
        compiled.gather(self.arrays, row, text)
        return text

    def place(self, handle: int, state: int, weight: float) -> None:
        """Set the end and the weight of a cursor's text."""
        cursor = self.arrays.cursors[handle & _ROW_MASK]
        cursor["state"], cursor["weight"] = state, weight

    def halt(self, handle: int) -> None:
        """Halt a cursor: nothing more is appended or predicted."""
        self.arrays.cursors["halted"][handle & _ROW_MASK] = 1

    def empty(self, handle: int) -> None:
        """Forget the text of a cursor."""
        compiled.discard(self.arrays, handle & _ROW_MASK)

    def halted(self, handle: int) -> bool:
        """Return True if a cursor is halted."""
        return bool(self.arrays.cursors["halted"][handle & _ROW_MASK])

    def are_halted(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each of these cursors [n] whether it is halted."""
        return np.asarray(self.arrays.cursors["halted"][handles & _ROW_MASK] != 0)

    def grow(self) -> None:
        """Enlarge the arrays that lacked room. Full: they are at the bound."""
        arrays, scalars = self.arrays, self.arrays.scalars
        rows = len(arrays.states)
        if scalars[STATES] + 2 > rows:
            arrays.states.resize(_larger(rows, rows + 2, self._most_states), refcheck=False)
            arrays.states["length"][rows:] = FREE
            scalars[FREE_STATE] = _chain(arrays.states, "link", rows, scalars[FREE_STATE])
        needed = int(scalars[EDGES_END] + scalars[LACKING])
        if needed > len(arrays.edges):
            arrays.edges.resize(_larger(len(arrays.edges), needed, self._most_edges), refcheck=False)
        rows = len(arrays.chunks)
        if scalars[FREE_CHUNK] == NOWHERE:
            arrays.chunks.resize(max(_FEW, int(rows * _GROWTH)), refcheck=False)
            scalars[FREE_CHUNK] = _chain(arrays.chunks, "next", rows, NOWHERE)
        scalars[LACKING] = 0

    def relieve(self) -> None:
        """Enlarge the shared table when it is three quarters full, up to its bound."""
        entries = self.arrays.entries
        if 4 * self.arrays.scalars[ENTRIES] > 3 * len(entries) and 2 * len(entries) <= self._most_entries:
            larger = np.zeros(2 * len(entries), np.uint64)
            compiled.enlarge(entries, larger)
            self.arrays = self.arrays._replace(entries=larger)


def _recent_entries(max_tokens: int) -> int:
    """Return the size of the table of latest occurrences: one entry per token, within bounds."""
    return min(max(tables.LEAST_RECENT, 1 << max_tokens.bit_length()), tables.MOST_RECENT)


def _larger(rows: int, needed: int, most: int) -> int:
    if needed > most:
        raise Full
    return min(max(_FEW, needed, int(rows * _GROWTH)), most)


def _chain(array: NDArray[np.void], column: str, start: int, end: int) -> int:
    """Link the rows from `start` on to a list that continues with row `end`; return its first row."""
    if start == len(array):
        return end
    array[column][start:] = np.arange(start + 1, len(array) + 1)
    array[column][-1] = end
    return start
