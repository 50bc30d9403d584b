"""Edit rows of logits: penalties, and masks by token, of the samples that ask for them and of no others.

Masks by probability (min-p, top-k, top-p) are the kernels' (kernels/coupled_sampler/masks.py), for every row.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.metadata import SamplingMetadata

from kernels.coupled_sampler.sample import Edited
from services.generation.engine.grammars import apply_masks
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.penalties import Histories, penalise
from services.generation.engine.sampling.rows import IntArray, Rows

CHUNK_BYTES = 64 << 20
"""Memory that rows are worked on in at a time, beside that of the result."""


class RowMasks(NamedTuple):
    """Masks of grammars, one bit a token, for each row of a step; `rows` are those that they apply to."""

    bits: torch.Tensor
    rows: list[int]


def temperatures(metadata: SamplingMetadata, n: int) -> torch.Tensor:
    """Return the temperature of each sample, [n] float32, where vLLM has them; 0 is greedy."""
    if metadata.all_greedy or metadata.temperature is None:
        return torch.zeros(n, dtype=torch.float32)
    return metadata.temperature[:n]  # type: ignore[no-any-return]


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
    edited = torch.empty((len(index), logits.shape[1]), dtype=torch.float32, device=logits.device)
    for begin, end in chunks(len(index), logits.shape[1]):
        edited[begin:end] = logits[_there(index[begin:end], logits)]
    _penalise(edited, index, penalised[index], rows, noise, histories)
    place, samples = np.cumsum(chosen) - 1, rows.samples
    for row in np.flatnonzero(withheld).tolist():
        edited[place[row], list(noise[samples[row]].forbidden)] = float("-inf")
    _limit(edited, place[limited], [noise[owner].allowed for owner in samples[limited].tolist()])
    if masks is not None:
        # The masks of the edited rows, each where its row is now.
        apply_masks(edited, masks.bits[torch.from_numpy(index)], place[masks.rows].tolist())
    return Edited(torch.from_numpy(index), edited)


def chunks(rows: int, width: int) -> list[tuple[int, int]]:
    """Cut float32 rows into ranges of at most CHUNK_BYTES each, or one row."""
    each = max(1, CHUNK_BYTES // (4 * width))
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
        there = _there(part, edited)
        edited[there] = penalise(edited[there], index[part], rows, noise, histories)


def _limit(edited: torch.Tensor, places: IntArray, allowed: list[tuple[int, ...]]) -> None:
    """Mask all but the allowed tokens of some rows, in place."""
    if not len(places):
        return
    counts = [len(tokens) for tokens in allowed]
    row = _there(np.repeat(places, counts), edited)
    token = _there(np.fromiter(chain.from_iterable(allowed), np.int64, sum(counts)), edited)
    kept = edited[row, token]
    edited[_there(places, edited)] = float("-inf")
    edited[row, token] = kept


def _there(index: IntArray, tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(index).to(tensor.device)
