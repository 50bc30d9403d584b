"""The likeliest tokens of emitted rows, for the samples that ask for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.coupled_sampler.sample import Edited
from services.generation.engine.marks import NO_TOKEN
from services.generation.engine.sampling.constraints import chunks
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import IntArray, Rows

FloatArray = npt.NDArray[np.float32]


def likeliest(
    logits: torch.Tensor,
    rows: Rows,
    counts: IntArray,
    noise: list[SampleNoise],
    temperature: torch.Tensor,
    edited: Edited | None,
    lowest: torch.Tensor | None,
) -> tuple[IntArray, FloatArray]:
    """Return the likeliest tokens of emitted rows and their log-probabilities, [R, K]; K is the most asked for.

    They are of the model's own distribution, or of what is sampled from, as the sample asks. Behind as many as it
    asks for there are NO_TOKEN. A few rows at a time are widened to float32.

    Args:
        logits: [R, V], any float type.
        rows: the layout.
        counts: emitted tokens of each sample, [n].
        noise: one per sample.
        temperature: [n], of the samples.
        edited: what some rows are sampled from instead.
        lowest: the least scaled logit that is kept of each row, [R]; None: all are.
    """
    asked = np.fromiter((item.top_logprobs for item in noise), np.int64, len(noise))
    most = int(asked.max(initial=0))
    samples = rows.samples
    tokens, values = (
        np.full((len(samples), most), NO_TOKEN, np.int64),
        np.zeros((len(samples), most), np.float32),
    )
    if not most:
        return tokens, values
    by_processed = np.fromiter((item.processed_logprobs for item in noise), bool, len(noise))[samples]
    wanted = (asked[samples] > 0) & (rows.offsets < counts[samples])
    for chosen, processed in ((wanted & by_processed, True), (wanted & ~by_processed, False)):
        index = np.flatnonzero(chosen)
        for begin, end in chunks(len(index), logits.shape[1]):
            part = index[begin:end]
            if processed:
                own = _sampled_from(logits, part, samples[part], temperature, edited, lowest)
            else:
                own = logits[torch.from_numpy(part).to(logits.device)].float()
            best = own.topk(most, dim=-1)
            beyond = np.arange(most) >= asked[samples[part], None]
            tokens[part] = np.where(beyond, NO_TOKEN, best.indices.cpu().numpy())
            values[part] = (best.values - own.logsumexp(dim=-1, keepdim=True)).cpu().numpy()
    return tokens, values


def _sampled_from(
    logits: torch.Tensor,
    index: IntArray,
    samples: IntArray,
    temperature: torch.Tensor,
    edited: Edited | None,
    lowest: torch.Tensor | None,
) -> torch.Tensor:
    """Return edited, divided and masked logits of some rows, [m, V] float32."""
    device = logits.device
    there = torch.from_numpy(index).to(device)
    values = logits[there].float()
    if edited is not None:
        place = np.searchsorted(edited.rows.numpy(), index)
        place = np.minimum(place, len(edited.rows) - 1)
        mine = np.flatnonzero(edited.rows.numpy()[place] == index)
        values[torch.from_numpy(mine).to(device)] = edited.logits[torch.from_numpy(place[mine]).to(device)]
    heat = temperature.to(device)[torch.from_numpy(samples).to(device)].unsqueeze(1)
    values /= torch.where(heat > 0, heat, 1)
    if lowest is None:
        return values
    return values.masked_fill_(values < lowest[there].unsqueeze(1), -torch.inf)
