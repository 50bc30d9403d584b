"""Table of references on the device: where the drafts of a step are read from.

A row belongs to a sample and holds guesses of its tokens by their position, prompt included. A segment that is
posted, a guess that begins at some position, takes the place of what was there. When a step begins the device reads
the drafts behind the tokens that the sample has by then, of which the host need not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from vllm.v1.worker.gpu.states import RequestState

from kernels.draft_table import DraftTable, Segments

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
