"""EAGLE-3 drafter: a head trained on the target's output, which reads the target's hidden features.

Row t of the head reads the target's features of token t together with token t + 1, and says what token t + 2 will
be; its KV is at slot t of the sample's own blocks. The rows that a sample misses are read in one pass before its
first draft step, from the features that the target left: a row for each token that was accepted since, or all of
them where the sample was decoded without the drafter so far, was preempted or came from another engine, or where
the head is another now.

Draft steps behind the last token read the head's own hidden states, and their KV is provisional: the pass before
the next draft writes the rows of the true tokens over it. Where samples share the block of a prefix, its last row
is that of the sample that came last: it read a token of the block behind. Nothing but a guess depends on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from services.generation.engine.draft_models.catch_up import allot
from services.generation.engine.draft_models.draft_pass import DraftPass, on
from services.generation.engine.draft_models.draft_rows import DraftRows
from services.generation.engine.draft_models.eagle3_model import Eagle3Model
from services.generation.engine.draft_models.interface import StaleDrafter
from services.generation.engine.sampling.rows import IntArray
from services.generation.engine.types import Ask, Drafted, Eagle3Options


class _Read(NamedTuple):
    """Number of a sample's first rows that are in its KV, and its preemptions at that time."""

    rows: int
    preemptions: int


class Eagle3:
    """Head of a runner's model, and its draft loop. A `ModelDrafter`."""

    def __init__(self, runner: Any, options: Eagle3Options) -> None:
        """Load the head. Raises what `Eagle3Model` raises."""
        self._runner = runner
        self._model = Eagle3Model(runner, options)
        self._budget = min(options.catch_up_tokens, runner.max_num_tokens)
        self._version: int | None = None
        self._read: dict[str, _Read] = {}
        runner.features = self._model.features

    @property
    def nbytes(self) -> int:
        """Memory of the head's weights, in bytes."""
        return self._model.nbytes

    def forget(self) -> None:
        """Forget which rows are in the KV: the target's weights, and all KV, are about to change."""
        self._version = None
        self._read.clear()

    def drop(self) -> None:
        """Do as `forget`: the weights of the head sleep with the target's."""
        self.forget()

    def begin(self, version: int) -> None:
        """Note the version: the head drafts for any weights of the target."""
        self._version = version

    def build(self, seconds: float) -> bool:
        """Return True: the head needs no preparation."""
        return self._version is not None

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; the KV of all samples is computed again with them."""
        self._read.clear()
        self._model.swap(tensors)

    @torch.inference_mode()
    def propose(self, version: int, asks: Sequence[Ask]) -> Drafted:
        """Draft tokens by sample; none for a sample whose rows are not all in the KV yet.

        Raises:
            StaleDrafter: these weights are not the target's.
        """
        if self._version != version:
            raise StaleDrafter(f"the head drafts for weights {self._version}, not for {version}")
        self._forget_ended()
        rows = DraftRows(self._runner, [ask for ask in asks if ask.length > 1])
        if not len(rows):
            return Drafted({})
        # At least the last row, which says what comes next.
        starts = np.minimum(self._rows_read(rows.asks), rows.positions - 1)
        missing = rows.positions - starts
        counts = allot(missing, self._budget)
        # Samples with one row come first, as the kernels of some backends want it.
        reading = np.flatnonzero(counts)
        reading = reading[np.argsort(counts[reading], kind="stable")]
        place = np.empty(len(rows), np.int64)
        place[reading] = np.arange(len(reading))
        live = np.flatnonzero(counts == missing)
        states, says = self._catch_up(rows, reading, starts[reading], counts[reading])
        for i in reading.tolist():
            ask = rows.asks[i]
            self._read[ask.sample_id] = _Read(int(starts[i] + counts[i]), ask.preemptions)
        # By sample, what the coming draft step reads.
        hidden = torch.zeros(len(rows), states.shape[1], dtype=states.dtype, device=states.device)
        hidden[on(reading, states.device)] = states

        def forward(tokens: IntArray, live: IntArray, step: int) -> torch.Tensor:
            if step == 0:
                return self._model.logits(says[on(place[live], says.device)])
            where = on(live, hidden.device)
            starts = rows.positions[live] + step - 1
            ahead = DraftPass(self._runner, rows.places[live], starts, np.ones(len(live), np.int64))
            with ahead.context(step):
                out, state = self._model.run(on(tokens, hidden.device), ahead.positions, hidden[where])
            hidden[where] = state
            return self._model.logits(out)

        return Drafted(rows.draft(live, forward), int(counts.sum()))

    def _rows_read(self, asks: Sequence[Ask]) -> IntArray:
        """Return the number of each sample's rows in its KV, [n]; 0 once its KV is in other blocks."""
        found = []
        for ask in asks:
            read = self._read.get(ask.sample_id)
            found.append(read.rows if read is not None and read.preemptions == ask.preemptions else 0)
        return np.array(found, np.int64)

    def _catch_up(
        self, rows: DraftRows, reading: IntArray, starts: IntArray, counts: IntArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the missing rows; returns each sample's last state and the input of its logits, [m, hidden]."""
        places = rows.places[reading]
        read = DraftPass(self._runner, places, starts, counts)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
        tokens = rows.tokens_at(np.repeat(places, counts), positions + 1)
        hidden = self._model.combine(self._model.features.read(read.slots))
        with read.context(0):
            out, state = self._model.run(on(tokens, self._runner.device), read.positions, hidden)
        last = on(ends - 1, out.device)
        return state[last], out[last]

    def _forget_ended(self) -> None:
        known = self._runner.requests
        if len(self._read) > 2 * len(known) + 16:
            self._read = {key: read for key, read in self._read.items() if key in known}
