"""Verify and sample by the kernels, where the logits are; only tokens and log-probabilities leave it."""

from __future__ import annotations

import numpy as np
import torch

from kernels.coupled_sampler.proposals import RowProposals
from kernels.coupled_sampler.sample import Edited, Sampled, sample
from services.generation.engine.sampling.draw_settings import DrawSettings
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import Rows


def draw(
    logits: torch.Tensor,
    rows: Rows,
    settings: DrawSettings,
    noise: list[SampleNoise],
    edited: Edited | None,
    proposals: RowProposals | None,
) -> Sampled:
    """Sample and verify all rows: one copy to the device, which is not waited for, and one from it, which is.

    Args:
        logits: [R, V], any float type.
        rows: the layout.
        settings: temperature and masks of the samples.
        noise: one per sample.
        edited: what some rows are sampled from instead.
        proposals: tokens to accept by their probability.

    Returns:
        The result in host memory, but for the thresholds.
    """
    n = len(noise)
    seeds = np.fromiter((item.seed for item in noise), np.uint64, n).view(np.int64)
    min_p = np.fromiter((item.min_p for item in noise), np.float32, n)
    return sample(
        logits,
        torch.from_numpy(seeds),
        torch.from_numpy(rows.positions),
        torch.from_numpy(settings.temperature),
        torch.from_numpy(rows.drafts),
        torch.from_numpy(rows.cu),
        top_k=None if settings.top_k is None else torch.from_numpy(settings.top_k),
        top_p=None if settings.top_p is None else torch.from_numpy(settings.top_p),
        min_p=torch.from_numpy(min_p) if min_p.any() else None,
        edited=edited,
        proposals=proposals,
    ).to_host()
