"""Tables of V2 on the device: references from which drafts are read, and cached rollouts that samples follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.states import RequestState

from kernels.draft_table import DraftTable, Segments
from kernels.transfer import uploaded
from services.generation.engine.sampling.inputs import CachedRollout
from services.generation.engine.sampling.rows import IntArray

LONGEST_DRAFT = 128
"""Most draft tokens of a sample in a step."""


class DraftSegment(NamedTuple):
    """Guess of a sample's tokens from position `start` on, counted from the begin of the prompt."""

    sample_id: str
    start: int
    tokens: Sequence[int]


class References:
    """References of the samples in a runner's slots: guesses of their tokens by position, prompt included.

    A posted segment, a guess that begins at some position, replaces earlier guesses there. When a step begins, the
    device reads the drafts that follow the tokens the sample has by then, whose number the host need not know.
    """

    def __init__(self, states: RequestState) -> None:
        """Allocate [slots, longest sequence] int32 on the device of the runner."""
        self._states = states
        self._table = DraftTable(states.max_num_reqs, states.max_model_len, states.device)
        # Guesses that are not on the device yet: start and tokens, by slot. One launch per step writes all of
        # them in no particular order, so only the latest of each slot is kept.
        self._pending: dict[int, tuple[int, list[int]]] = {}
        states.draft_tokens = torch.zeros(
            (states.max_num_reqs, LONGEST_DRAFT), dtype=torch.int64, device=states.device
        )

    def clear(self, slot: int) -> None:
        """Forget the reference of a slot, because another sample takes it."""
        self._pending[slot] = (0, [])

    def post(self, segments: Iterable[DraftSegment]) -> None:
        """Keep the latest segment of each sample for the next drafts, cut at the longest sequence.

        Segments of samples without a slot are dropped.
        """
        for sample_id, start, tokens in segments:
            slot = self._states.req_id_to_index.get(sample_id)
            room = self._states.max_model_len - start
            if slot is not None and room > 0:
                self._pending[slot] = (start, list(tokens[:room]))

    def draft(self, slots: torch.Tensor, longest: int) -> None:
        """Copy the next reference tokens of some slots, [n], to the place where the runner reads drafts.

        Without a reference the token is 0, which is verified like any other draft.
        """
        self._write()
        found = self._table.gather(slots, self._states.total_len.gpu[slots], longest)
        self._states.draft_tokens[slots, :longest] = found

    def _write(self) -> None:
        if self._pending:
            self._table.write(Segments.of((slot, *guess) for slot, guess in self._pending.items()))
            self._pending.clear()


_FEWEST_ROWS, _SHORTEST = 8, 256


@dataclass(frozen=True, slots=True)
class RolloutFollowers:
    """Samples of a step that have a row: `places` [m] among its samples, ascending, and their `rows` [m]."""

    places: IntArray
    rows: IntArray


class RolloutTable:
    """Cached rollouts by row; `live` [rows] is True while the row's sample has reused every token so far.

    `tokens` [rows, longest] int32 are the rollouts, with `lengths` [rows]. `scales` [rows, longest] float64,
    times a uniform, is the bound that the probability of each token must exceed (`CachedRollout.scales`).

    A LENIENT sample has a row from its first step on the runner until it has left its rollout, whichever slots it
    has meanwhile. The device knows at once that a sample has left; the host knows when the step is over, and frees
    the row then.
    """

    def __init__(self, device: torch.device) -> None:
        """Create an empty table without memory."""
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self.tokens = torch.zeros((0, _SHORTEST), dtype=torch.int32, device=device)
        self.scales = torch.zeros((0, _SHORTEST), dtype=torch.float64, device=device)
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.live = torch.zeros(0, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, sample_id: str, rollout: CachedRollout) -> None:
        """Let a sample follow a rollout, without waiting for the copy."""
        length = len(rollout.tokens)
        self._make_room(length)
        self._rows[sample_id] = row = self._free.pop()
        there = uploaded(
            {
                "scales": torch.from_numpy(rollout.scales()),
                "tokens": torch.from_numpy(rollout.tokens.astype(np.int32)),
            },
            self.tokens.device,
        )
        self.tokens[row, :length], self.scales[row, :length] = there["tokens"], there["scales"]
        self.lengths[row], self.live[row] = length, True

    def end(self, sample_id: str) -> None:
        """Free the row of a sample. A sample without a row is ignored."""
        row = self._rows.pop(sample_id, None)
        if row is not None:
            self._free.append(row)

    def among(self, sample_ids: Sequence[str]) -> RolloutFollowers | None:
        """Return the samples of a step that have a row; None if none has."""
        found = [(place, self._rows[name]) for place, name in enumerate(sample_ids) if name in self._rows]
        return RolloutFollowers(*np.array(found, np.int64).T) if found else None

    def advance(
        self,
        followers: RolloutFollowers,
        positions: torch.Tensor,
        counts: torch.Tensor,
        reused: torch.Tensor,
        whole: torch.Tensor,
    ) -> None:
        """Record which samples left their rollouts in a step.

        Args:
            followers: samples of the step that have a row.
            positions: response tokens that the samples had before the step, [n].
            counts: tokens that they emit, [n].
            reused: number of reused tokens, which come first among the emitted ones, [n].
            whole: False for a sample whose prompt is only partly computed, whose tokens are discarded, [n].
        """
        there = uploaded(
            {"places": torch.from_numpy(followers.places), "rows": torch.from_numpy(followers.rows)},
            self.tokens.device,
        )
        rows, places = there["rows"], there["places"]
        follows = (reused == counts)[places] & ((positions + reused)[places] < self.lengths[rows])
        self.live[rows] &= follows | ~whole[places]

    def _make_room(self, length: int) -> None:
        """Ensure that there is a free row, with columns for `length` tokens."""
        rows, width = self.tokens.shape
        new = 0 if self._free else max(_FEWEST_ROWS, rows)
        wider = max(width, 1 << (length - 1).bit_length())
        if not new and wider == width:
            return
        for name in ("tokens", "scales"):
            old: torch.Tensor = getattr(self, name)
            larger = old.new_zeros((rows + new, wider))
            larger[:rows, :width] = old
            setattr(self, name, larger)
        self.lengths = torch.cat((self.lengths, self.lengths.new_zeros(new)))
        self.live = torch.cat((self.live, self.live.new_zeros(new)))
        self._free.extend(range(rows, rows + new))
