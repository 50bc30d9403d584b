"""The likeliest tokens of emitted rows, for the samples that ask for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.coupled_sampler.sample import Edited
from kernels.transfer import downloaded
from services.generation.engine.marks import NO_TOKEN
from services.generation.engine.sampling.constraints import chunks
from services.generation.engine.sampling.draw_settings import DrawSettings
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import IntArray, Rows, put

FloatArray = npt.NDArray[np.float32]


def likeliest(
    logits: torch.Tensor,
    rows: Rows,
    counts: IntArray,
    noise: list[SampleNoise],
    settings: DrawSettings,
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
        settings: of the samples.
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
    found: list[tuple[IntArray, torch.Tensor, torch.Tensor]] = []
    for chosen, processed in ((wanted & by_processed, True), (wanted & ~by_processed, False)):
        index = np.flatnonzero(chosen)
        for begin, end in chunks(len(index), logits.shape[1]):
            part = index[begin:end]
            if processed:
                own = sampled_from(logits, part, samples[part], settings, edited, lowest)
            else:
                own = logits[put(logits.device, part=part)["part"]].float()
            best = own.topk(most, dim=-1)
            found.append((part, best.indices, best.values - own.logsumexp(dim=-1, keepdim=True)))
    if found:
        # The device is waited for once, when it has all of them.
        index = np.concatenate([part for part, _, _ in found])
        best_tokens, best_values = (downloaded(torch.cat([each[k] for each in found])) for k in (1, 2))
        beyond = np.arange(most) >= asked[samples[index], None]
        tokens[index] = np.where(beyond, NO_TOKEN, best_tokens.numpy())
        values[index] = best_values.numpy()
    return tokens, values


def sampled_from(
    logits: torch.Tensor,
    index: IntArray,
    samples: IntArray,
    settings: DrawSettings,
    edited: Edited | None,
    lowest: torch.Tensor | None,
) -> torch.Tensor:
    """Return edited, divided and masked logits of some rows, [m, V] float32."""
    vectors: dict[str, npt.NDArray[Any]] = {"index": index, "divisor": settings.divisor[samples]}
    if edited is not None:
        numbers = edited.rows.numpy()
        place = np.minimum(np.searchsorted(numbers, index), len(numbers) - 1)
        vectors["mine"] = np.flatnonzero(numbers[place] == index)
        vectors["place"] = place[vectors["mine"]]
    there = put(logits.device, **vectors)
    values = logits[there["index"]].float()
    if edited is not None:
        values[there["mine"]] = edited.logits[there["place"]]
    values /= there["divisor"].unsqueeze(1)
    if lowest is None:
        return values
    return values.masked_fill_(values < lowest[there["index"]].unsqueeze(1), -torch.inf)
