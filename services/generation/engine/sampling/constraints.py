"""Apply penalties and masks by token to the rows of logits whose samples request them.

Masks by probability (min-p, top-k, top-p) are applied by the kernels, to every row
(kernels/coupled_sampler/reference.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.coupled_sampler.sample import Edited
from services.generation.engine.grammars import apply_masks
from services.generation.engine.sampling.inputs import SampleSettings
from services.generation.engine.sampling.rows import IntArray, Rows, put
from services.generation.engine.step_sizes import PART_BYTES

# Flag of a token that is in the prompt. The bits below it count how often the token is in the response.
_IN_PROMPT = 1 << 30
_FEWEST_SLOTS = 8


class History(NamedTuple):
    """Known tokens of one sample: its prompt and its response so far."""

    sample_id: str
    prompt: npt.NDArray[np.integer]
    response: npt.NDArray[np.integer]


class Histories(NamedTuple):
    """Token counts of the samples of a step: row slots[i] of `table` [*, V] int32 is sample i's; -1: no penalties.

    `more` has the tokens of each sample that follow its counted ones and precede its first row.
    """

    table: torch.Tensor
    slots: IntArray
    more: Sequence[Sequence[int]]


class TokenCounts:
    """Counts of each token in the prompt and response of an engine's samples with penalties.

    They are on the device of the logits. A step adds only its new tokens, so its cost does not grow with a
    response, and the rows of a draft count only the draft tokens before them. The counts of n samples take 4 n V
    bytes, from the first sample with a penalty on.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Create an empty table for a vocabulary, on the device of the logits."""
        self._table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._free: list[int] = []

    def forget(self, sample_id: str) -> None:
        """Free the slot of a sample. An unknown sample is ignored."""
        slot = self._slots.pop(sample_id, None)
        if slot is not None:
            self._free.append(slot)
            del self._counted[sample_id]

    def histories(
        self, samples: Sequence[History | None], more: Sequence[Sequence[int]] | None = None
    ) -> Histories:
        """Count the new tokens of these samples, None for a sample without penalties. Responses only grow."""
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
            larger = torch.zeros((known + new, width), dtype=torch.int32, device=self._table.device)
            larger[:known] = self._table
            self._table = larger
            self._free.extend(range(known, known + new))
        slot = self._free.pop()
        self._table[slot] = 0
        there = put(self._table.device, prompt=np.unique(sample.prompt).astype(np.int64))
        self._table[slot, there["prompt"]] = _IN_PROMPT
        self._slots[sample.sample_id], self._counted[sample.sample_id] = slot, 0

    def _add(self, slots: IntArray, tokens: IntArray) -> None:
        index = put(self._table.device, index=slots * self._table.shape[1] + tokens)["index"]
        self._table.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))


class RowMasks(NamedTuple):
    """Masks of grammars for the rows of a step, one bit per token; `rows` are the rows to which they apply."""

    bits: torch.Tensor
    rows: list[int]


def edit(
    logits: torch.Tensor,
    rows: Rows,
    samples: Sequence[SampleSettings],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
) -> Edited | None:
    """Apply penalties and masks by token to the rows whose samples request them. None if none does.

    Args:
        logits: logits [R, V], any float type; not changed.
        rows: layout of the step.
        samples: settings of the samples.
        masks: masks of the rows of samples that follow a grammar.
        histories: token counts of the samples; may be None if no sample has penalties.
    """
    if masks is None and not any(each.penalised or each.allowed or each.forbidden for each in samples):
        return None
    penalised = _of_rows(rows, [each.penalised for each in samples])
    limited = _of_rows(rows, [bool(each.allowed) for each in samples])
    withheld = _of_rows(rows, [bool(each.forbidden) for each in samples])
    if withheld.any():
        least = np.fromiter((each.min_tokens for each in samples), np.int64, len(samples))
        withheld &= rows.row_positions < least[rows.samples]
    chosen = penalised | limited | withheld
    if masks is not None:
        chosen[masks.rows] = True
    index = np.flatnonzero(chosen)
    if not len(index):
        return None
    place, owners = np.cumsum(chosen) - 1, rows.samples
    kept = _entries(place[limited], [samples[owner].allowed for owner in owners[limited].tolist()])
    lost = _entries(place[withheld], [samples[owner].forbidden for owner in owners[withheld].tolist()])
    named = {"kept_rows": kept[0], "kept": kept[1], "lost_rows": lost[0], "lost": lost[1]}
    there = put(logits.device, index=index, limited=place[limited], **named)
    edited = torch.empty((len(index), logits.shape[1]), dtype=torch.float32, device=logits.device)
    for begin, end in chunks(len(index), logits.shape[1]):
        edited[begin:end] = logits[there["index"][begin:end]]
    _penalise(edited, index, penalised[index], rows, samples, histories)
    edited[there["lost_rows"], there["lost"]] = -torch.inf
    values = edited[there["kept_rows"], there["kept"]]
    edited[there["limited"]] = -torch.inf
    edited[there["kept_rows"], there["kept"]] = values
    if masks is not None:
        # Each mask moves to the place of its row among the edited ones.
        apply_masks(edited, masks.bits[torch.from_numpy(index)], place[masks.rows].tolist())
    return Edited(torch.from_numpy(index), edited)


def _of_rows(rows: Rows, each: list[bool]) -> npt.NDArray[np.bool_]:
    return np.array(each, bool)[rows.samples]


def _entries(places: IntArray, tokens: list[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
    """Return the row and the column of each token of some rows, [entries]."""
    counts = [len(each) for each in tokens]
    return np.repeat(places, counts), np.fromiter(chain.from_iterable(tokens), np.int64, sum(counts))


def chunks(rows: int, width: int) -> list[tuple[int, int]]:
    """Cut float32 rows into ranges of at most PART_BYTES each, or one row."""
    each = max(1, PART_BYTES // (4 * width))
    return [(begin, min(begin + each, rows)) for begin in range(0, rows, each)]


def _penalise(
    edited: torch.Tensor,
    index: IntArray,
    penalised: npt.NDArray[np.bool_],
    rows: Rows,
    samples: Sequence[SampleSettings],
    histories: Histories | None,
) -> None:
    """Apply penalties in place to the rows of `edited` that are `penalised`, a part at a time."""
    if not penalised.any():
        return
    assert histories is not None
    among = np.flatnonzero(penalised)
    for begin, end in chunks(len(among), edited.shape[1]):
        part = among[begin:end]
        there = put(edited.device, part=part)["part"]
        edited[there] = penalise(edited[there], index[part], rows, samples, histories)


def penalise(
    values: torch.Tensor, index: IntArray, rows: Rows, samples: Sequence[SampleSettings], histories: Histories
) -> torch.Tensor:
    """Return logits of some rows with their samples' penalties applied.

    Args:
        values: logits of these rows, [m, V] float32.
        index: the rows, [m]; their samples all have penalties.
        rows: layout of the step.
        samples: settings of the samples.
        histories: token counts of the samples.
    """
    owners = rows.samples[index]
    row, token = _uncounted(index, rows, histories.more)
    each = np.array(
        [(n.repetition_penalty, n.frequency_penalty, n.presence_penalty) for n in samples], np.float32
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
    # Products and differences are separate operations, so that every device rounds alike.
    values -= frequency * times
    values -= presence * (times > 0)
    return values


def _uncounted(index: IntArray, rows: Rows, more: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return the tokens of each row that follow the counted ones, with the row's place in `index`."""
    found, tokens = list[int](), list[int]()
    owners, offsets = rows.samples[index].tolist(), rows.offsets[index].tolist()
    for place, (owner, offset) in enumerate(zip(owners, offsets, strict=True)):
        own = [*more[owner], *rows.drafts_of(owner)[:offset].tolist()]
        tokens += own
        found += [place] * len(own)
    return np.array(found, np.int64), np.array(tokens, np.int64)
