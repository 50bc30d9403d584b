"""Tables of V2 on the device: references that drafts are read from, and cached rollouts that samples follow.

A row of references belongs to a sample and holds guesses of its tokens by their position, prompt included. A
posted segment, a guess that begins at some position, replaces the earlier guesses there. When a step begins the
device reads the drafts behind the tokens that the sample has by then, which the host need not know.

A LENIENT sample has a row of the rollout table from its first step on the runner until it has left its rollout,
whatever slots it has meanwhile. The device knows at once that it has left, and the host when the step is over:
then the row is given back.
"""

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
    """Guess of a sample's tokens from position `start` on, the prompt counted."""

    sample_id: str
    start: int
    tokens: Sequence[int]


class References:
    """References of the samples in a runner's slots. A slot that is given to another sample has none."""

    def __init__(self, states: RequestState) -> None:
        """Take [slots, longest sequence] int32 on the device of the runner."""
        self._states = states
        self._table = DraftTable(states.max_num_reqs, states.max_model_len, states.device)
        # What is not on the device yet, by slot: where it begins, and its tokens. One launch a step writes all of
        # it, in no order: of a slot only the latest counts.
        self._pending: dict[int, tuple[int, list[int]]] = {}
        states.draft_tokens = torch.zeros(
            (states.max_num_reqs, LONGEST_DRAFT), dtype=torch.int64, device=states.device
        )

    def clear(self, slot: int) -> None:
        """Forget the reference of a slot, which another sample takes."""
        self._pending[slot] = (0, [])

    def post(self, segments: Iterable[DraftSegment]) -> None:
        """Keep segments for the next drafts, the latest of each sample, as far as sequences reach.

        Those of samples without a slot are dropped.
        """
        for sample_id, start, tokens in segments:
            slot = self._states.req_id_to_index.get(sample_id)
            room = self._states.max_model_len - start
            if slot is not None and room > 0:
                self._pending[slot] = (start, list(tokens[:room]))

    def draft(self, slots: torch.Tensor, longest: int) -> None:
        """Put the next tokens of the references of some slots, [n], where the runner takes drafts from.

        Where there is no reference it is token 0, which is a draft like any other.
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
    """Samples of a step that have a row: `places` [m] among its samples, rising, and their `rows` [m]."""

    places: IntArray
    rows: IntArray


class RolloutTable:
    """Cached rollouts by row; `live` [rows] is True for those whose sample has taken over every token so far.

    `tokens` [rows, longest] int32 are the rollouts, of `lengths` [rows]. With a uniform, `scales` [rows, longest]
    float64 give what the probability of each must exceed (`CachedRollout.scales`).
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without rollouts, and without memory for any."""
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self.tokens = torch.zeros((0, _SHORTEST), dtype=torch.int32, device=device)
        self.scales = torch.zeros((0, _SHORTEST), dtype=torch.float64, device=device)
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.live = torch.zeros(0, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, sample_id: str, rollout: CachedRollout) -> None:
        """Let a sample follow a rollout. Nobody waits for the copy."""
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
        """Give the row of a sample to others. One that has none is ignored."""
        row = self._rows.pop(sample_id, None)
        if row is not None:
            self._free.append(row)

    def among(self, sample_ids: Sequence[str]) -> RolloutFollowers | None:
        """Return the samples that have a row, of those of a step; None if none has."""
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
        """Take note of who left its rollout in a step.

        Args:
            followers: of the step.
            positions: response tokens that its samples had before it, [n].
            counts: tokens that they emit, [n].
            reused: how many of those, the first, were taken over, [n].
            whole: False for one whose prompt is only partly computed, of which nothing is kept, [n].
        """
        there = uploaded(
            {"places": torch.from_numpy(followers.places), "rows": torch.from_numpy(followers.rows)},
            self.tokens.device,
        )
        rows, places = there["rows"], there["places"]
        goes_on = (reused == counts)[places] & ((positions + reused)[places] < self.lengths[rows])
        self.live[rows] &= goes_on | ~whole[places]

    def _make_room(self, length: int) -> None:
        """Have a free row, and columns for so many tokens."""
        rows, width = self.tokens.shape
        new = 0 if self._free else max(_FEWEST_ROWS, rows)
        wider = max(width, 1 << (length - 1).bit_length())
        if not new and wider == width:
            return
        for name in ("tokens", "scales"):
            old: torch.Tensor = getattr(self, name)
            grown = old.new_zeros((rows + new, wider))
            grown[:rows, :width] = old
            setattr(self, name, grown)
        self.lengths = torch.cat((self.lengths, self.lengths.new_zeros(new)))
        self.live = torch.cat((self.live, self.live.new_zeros(new)))
        self._free.extend(range(rows, rows + new))
