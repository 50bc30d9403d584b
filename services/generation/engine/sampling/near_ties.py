"""The runner-up of each emitted token and its margin, for the samples that ask for near-ties.

They take the places of the likeliest tokens and their log-probabilities, which such samples do not ask for.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.coupled_sampler.runner_up import runner_up
from kernels.coupled_sampler.sample import Edited
from kernels.transfer import downloaded
from services.generation.engine.marks import NO_TOKEN
from services.generation.engine.sampling.constraints import chunks
from services.generation.engine.sampling.draw_settings import DrawSettings
from services.generation.engine.sampling.likeliest import FloatArray, sampled_from
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import IntArray, Rows, put


def with_runners_up(
    told: tuple[IntArray, FloatArray],
    logits: torch.Tensor,
    rows: Rows,
    drawn: tuple[IntArray, IntArray],
    noise: list[SampleNoise],
    settings: DrawSettings,
    edited: Edited | None,
    lowest: torch.Tensor | None,
) -> tuple[IntArray, FloatArray]:
    """Return `told` with the runner-up and its margin in the first column of the rows of these samples.

    Args:
        told: tokens and values of the rows, [R, K] each.
        logits: [R, V], any float type.
        rows: the layout.
        drawn: token of each row [R], and emitted tokens of each sample [n].
        noise: one per sample.
        settings: of the samples.
        edited: what some rows are sampled from instead.
        lowest: the least scaled logit that is kept of each row, [R]; None: all are.
    """
    asked = np.fromiter((item.near_ties for item in noise), bool, len(noise))
    if not asked.any():
        return told
    winners, counts = drawn
    tokens, values = told
    if not tokens.shape[1]:
        tokens, values = (
            np.full((len(winners), 1), NO_TOKEN, np.int64),
            np.zeros((len(winners), 1), np.float32),
        )
    wanted = asked[rows.samples] & (rows.offsets < counts[rows.samples]) & (winners >= 0)
    index = np.flatnonzero(wanted)
    seeds = np.fromiter((item.seed for item in noise), np.uint64, len(noise)).view(np.int64)
    found = list[tuple[torch.Tensor, torch.Tensor]]()
    for begin, end in chunks(len(index), logits.shape[1]):
        part = index[begin:end]
        samples = rows.samples[part]
        scaled = sampled_from(logits, part, samples, settings, edited, lowest)
        there = put(
            logits.device,
            winners=winners[part],
            seeds=seeds[samples],
            positions=rows.row_positions[part],
            noisy=settings.temperature[samples] > 0,
        )
        found.append(runner_up(scaled, there["winners"], there["seeds"], there["positions"], there["noisy"]))
    if found:
        tokens[index, 0] = downloaded(torch.cat([each[0] for each in found])).numpy()
        values[index, 0] = downloaded(torch.cat([each[1] for each in found])).numpy()
    return tokens, values
