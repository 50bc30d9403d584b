"""Edit rows of logits: penalties, and masks by token, of the samples that ask for them and of no others.

Masks by probability (min-p, top-k, top-p) are the kernels' (kernels/coupled_sampler/masks.py), for every row.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.coupled_sampler.sample import Edited
from services.generation.engine.grammars import apply_masks
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.penalties import Histories, penalise
from services.generation.engine.sampling.rows import IntArray, Rows, put
from services.generation.engine.step_memory import PART_BYTES


class RowMasks(NamedTuple):
    """Masks of grammars, one bit a token, for each row of a step; `rows` are those that they apply to."""

    bits: torch.Tensor
    rows: list[int]


def edit(
    logits: torch.Tensor,
    rows: Rows,
    noise: list[SampleNoise],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
) -> Edited | None:
    """Apply penalties and masks by token to the rows whose samples ask for them. None if none does.

    Args:
        logits: [R, V], any float type; left as it is.
        rows: the layout.
        noise: one per sample.
        masks: of the rows of samples that follow a grammar.
        histories: of the samples; may be None if no sample has penalties.
    """
    if masks is None and not any(item.penalised or item.allowed or item.forbidden for item in noise):
        return None
    penalised = _of_rows(rows, [item.penalised for item in noise])
    limited = _of_rows(rows, [bool(item.allowed) for item in noise])
    withheld = _of_rows(rows, [bool(item.forbidden) for item in noise])
    if withheld.any():
        least = np.fromiter((item.min_tokens for item in noise), np.int64, len(noise))
        withheld &= rows.row_positions < least[rows.samples]
    chosen = penalised | limited | withheld
    if masks is not None:
        chosen[masks.rows] = True
    index = np.flatnonzero(chosen)
    if not len(index):
        return None
    place, samples = np.cumsum(chosen) - 1, rows.samples
    kept = _entries(place[limited], [noise[owner].allowed for owner in samples[limited].tolist()])
    lost = _entries(place[withheld], [noise[owner].forbidden for owner in samples[withheld].tolist()])
    named = {"kept_rows": kept[0], "kept": kept[1], "lost_rows": lost[0], "lost": lost[1]}
    there = put(logits.device, index=index, limited=place[limited], **named)
    edited = torch.empty((len(index), logits.shape[1]), dtype=torch.float32, device=logits.device)
    for begin, end in chunks(len(index), logits.shape[1]):
        edited[begin:end] = logits[there["index"][begin:end]]
    _penalise(edited, index, penalised[index], rows, noise, histories)
    edited[there["lost_rows"], there["lost"]] = -torch.inf
    values = edited[there["kept_rows"], there["kept"]]
    edited[there["limited"]] = -torch.inf
    edited[there["kept_rows"], there["kept"]] = values
    if masks is not None:
        # The masks of the edited rows, each where its row is now.
        apply_masks(edited, masks.bits[torch.from_numpy(index)], place[masks.rows].tolist())
    return Edited(torch.from_numpy(index), edited)


def chunks(rows: int, width: int) -> list[tuple[int, int]]:
    """Cut float32 rows into ranges of at most PART_BYTES each, or one row."""
    each = max(1, PART_BYTES // (4 * width))
    return [(begin, min(begin + each, rows)) for begin in range(0, rows, each)]


def _of_rows(rows: Rows, each: list[bool]) -> npt.NDArray[np.bool_]:
    return np.array(each, bool)[rows.samples]


def _penalise(
    edited: torch.Tensor,
    index: IntArray,
    penalised: npt.NDArray[np.bool_],
    rows: Rows,
    noise: list[SampleNoise],
    histories: Histories | None,
) -> None:
    if not penalised.any():
        return
    assert histories is not None
    among = np.flatnonzero(penalised)
    for begin, end in chunks(len(among), edited.shape[1]):
        part = among[begin:end]
        there = put(edited.device, part=part)["part"]
        edited[there] = penalise(edited[there], index[part], rows, noise, histories)


def _entries(places: IntArray, tokens: list[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
    """Return the row and the column of each token of some rows, [entries]."""
    counts = [len(each) for each in tokens]
    return np.repeat(places, counts), np.fromiter(chain.from_iterable(tokens), np.int64, sum(counts))
