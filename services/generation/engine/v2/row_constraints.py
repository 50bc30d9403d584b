"""Penalties and masks by token of V2's sampler, on the device: as V1's, and nothing waits for the device.

Masks by probability (min-p, top-k, top-p) are the kernels'; the order is V1's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import torch

from services.generation.engine.grammars import apply_masks
from services.generation.engine.sampling.constraints import RowMasks
from services.generation.engine.v2.device_rows import DeviceRows
from services.generation.engine.v2.settings import BatchSettings

Penalise = Callable[[torch.Tensor], None]
"""Applies penalties to the logits of a step, [R, V] float32, in place."""


def constrain(
    raw: torch.Tensor, rows: DeviceRows, batch: BatchSettings, penalise: Penalise, masks: RowMasks | None
) -> torch.Tensor | None:
    """Return the logits, [R, V] float32, before masks by probability; None if nothing changes them."""
    samples = batch.samples
    penalised = any(each.penalised for each in samples)
    withheld = any(each.min_tokens and each.forbidden for each in samples)
    limited = any(each.allowed for each in samples)
    if not (penalised or withheld or limited or masks is not None):
        return None
    logits = raw.to(torch.float32, copy=True)
    if penalised:
        penalise(logits)
    if withheld:
        _withhold(logits, rows, batch)
    if limited:
        _limit(logits, rows, batch)
    if masks is not None:
        apply_masks(logits, masks.bits, masks.rows)
    return logits


def _withhold(logits: torch.Tensor, rows: DeviceRows, batch: BatchSettings) -> None:
    """Mask the tokens that would end a sample in rows at which it may not end yet, in place."""
    row, token, least = list[int](), list[int](), list[int]()
    for i, each in enumerate(batch.samples):
        if not (each.min_tokens and each.forbidden):
            continue
        own = range(int(rows.cu[i]), int(rows.cu[i + 1]))
        row += [place for place in own for _ in each.forbidden]
        token += list(each.forbidden) * len(own)
        least += [each.min_tokens] * (len(own) * len(each.forbidden))
    there = rows.put_all(row=np.array(row), token=np.array(token), least=np.array(least))
    place = (there["row"], there["token"])
    early = rows.row_positions(there["row"]) < there["least"]
    logits[place] = torch.where(early, -torch.inf, logits[place])


def _limit(logits: torch.Tensor, rows: DeviceRows, batch: BatchSettings) -> None:
    """Mask all but the allowed tokens in the rows of samples that have some, in place."""
    allowed = [batch.samples[owner].allowed for owner in rows.samples]
    limited = np.flatnonzero([bool(each) for each in allowed])
    counts = [len(allowed[row]) for row in limited]
    token = np.fromiter(chain.from_iterable(allowed[row] for row in limited), np.int64, sum(counts))
    there = rows.put_all(limited=limited, row=np.repeat(limited, counts), token=token)
    place = (there["row"], there["token"])
    kept = logits[place]
    logits[there["limited"]] = -torch.inf
    logits[place] = kept
