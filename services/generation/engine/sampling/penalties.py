"""Penalties by counts: how often each token is in a sample's prompt and response, kept where the logits are.

A step adds the tokens that are new to it, so it costs nothing that grows with a response, and the rows of a draft
only count the draft tokens before them. The counts of n samples take 4 n V bytes, which are there from the first
sample with a penalty on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import IntArray, Rows, put

_IN_PROMPT = 1 << 30
"""Of a token in the prompt; below it is how often the token is in the response."""
_FEWEST_SLOTS = 8


class History(NamedTuple):
    """Tokens of one sample, prompt and response, as far as they are known."""

    sample_id: str
    prompt: npt.NDArray[np.integer]
    response: npt.NDArray[np.integer]


class Histories(NamedTuple):
    """Counts of the samples of a step: row slots[i] of `table` [*, V] int32 is of sample i; -1: no penalties.

    `more` are tokens of each sample that are behind its counted ones, and before its first row.
    """

    table: torch.Tensor
    slots: IntArray
    more: Sequence[Sequence[int]]


class TokenCounts:
    """Counts of the samples with penalties that an engine holds."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Begin without samples, for a vocabulary and the device of the logits."""
        self._table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._free: list[int] = []

    def forget(self, sample_id: str) -> None:
        """Let a sample's slot go. An unknown sample is ignored."""
        slot = self._slots.pop(sample_id, None)
        if slot is not None:
            self._free.append(slot)
            del self._counted[sample_id]

    def histories(
        self, samples: Sequence[History | None], more: Sequence[Sequence[int]] | None = None
    ) -> Histories:
        """Count what is new of these samples, None for one without penalties. A response only ever grows."""
        slots, tokens, places = np.full(len(samples), -1), list[IntArray](), list[IntArray]()
        for i, sample in enumerate(samples):
            if sample is None:
                continue
            if sample.sample_id not in self._slots:
                self._begin(sample)
            slots[i] = slot = self._slots[sample.sample_id]
            new = sample.response[self._counted[sample.sample_id] :]
            self._counted[sample.sample_id] = len(sample.response)
            tokens.append(new.astype(np.int64))
            places.append(np.full(len(new), slot))
        if tokens:
            self._add(np.concatenate(places), np.concatenate(tokens))
        return Histories(self._table, slots, more or [()] * len(samples))

    def _begin(self, sample: History) -> None:
        if not self._free:
            known, width = self._table.shape
            new = max(_FEWEST_SLOTS, known)
            grown = torch.zeros((known + new, width), dtype=torch.int32, device=self._table.device)
            grown[:known] = self._table
            self._table = grown
            self._free.extend(range(known, known + new))
        slot = self._free.pop()
        self._table[slot] = 0
        there = put(self._table.device, prompt=np.unique(sample.prompt).astype(np.int64))
        self._table[slot, there["prompt"]] = _IN_PROMPT
        self._slots[sample.sample_id], self._counted[sample.sample_id] = slot, 0

    def _add(self, slots: IntArray, tokens: IntArray) -> None:
        index = put(self._table.device, index=slots * self._table.shape[1] + tokens)["index"]
        self._table.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))


def penalise(
    values: torch.Tensor, index: IntArray, rows: Rows, noise: Sequence[SampleNoise], histories: Histories
) -> torch.Tensor:
    """Return logits of some rows with their samples' penalties applied.

    Args:
        values: [m, V] float32.
        index: the rows, [m]; all of samples with penalties.
        rows: the layout of the step.
        noise: one per sample.
        histories: of the samples.
    """
    owners = rows.samples[index]
    row, token = _behind(index, rows, histories.more)
    each = np.array(
        [(n.repetition_penalty, n.frequency_penalty, n.presence_penalty) for n in noise], np.float32
    )
    names = ("repetition", "frequency", "presence")
    there = put(
        values.device,
        slots=histories.slots[owners],
        place=row * values.shape[1] + token,
        **dict(zip(names, each[owners].T, strict=True)),
    )
    counts = histories.table[there["slots"]]
    place = there["place"]
    counts.view(-1).scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
    repetition, frequency, presence = (there[name].unsqueeze(1) for name in names)
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(counts != 0, scaled, values)
    times = counts & (_IN_PROMPT - 1)
    # Products apart from the differences: rounded alike on every device.
    values -= frequency * times
    values -= presence * (times > 0)
    return values


def _behind(index: IntArray, rows: Rows, more: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return the tokens of each row behind the counted ones, with the row's place in `index`."""
    found, tokens = list[int](), list[int]()
    owners, offsets = rows.samples[index].tolist(), rows.offsets[index].tolist()
    for place, (owner, offset) in enumerate(zip(owners, offsets, strict=True)):
        own = [*more[owner], *rows.drafts_of(owner)[:offset].tolist()]
        tokens += own
        found += [place] * len(own)
    return np.array(found, np.int64), np.array(tokens, np.int64)
