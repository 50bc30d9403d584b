"""Verify and sample by the kernels, where the logits are; only tokens and log-probabilities leave it."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.sample.metadata import SamplingMetadata

from kernels.coupled_sampler.proposals import RowProposals
from kernels.coupled_sampler.sample import Edited, Sampled, sample
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import Rows


def draw(
    logits: torch.Tensor,
    rows: Rows,
    temperature: torch.Tensor,
    noise: list[SampleNoise],
    metadata: SamplingMetadata,
    edited: Edited | None,
    proposals: RowProposals | None,
) -> Sampled:
    """Sample and verify all rows: one copy to the device, which is not waited for, and one from it, which is.

    Args:
        logits: [R, V], any float type.
        rows: the layout.
        temperature: [n] float32, here or on the device; 0 is greedy.
        noise: one per sample.
        metadata: with the top-k and top-p masks.
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
        temperature,
        torch.from_numpy(rows.drafts),
        torch.from_numpy(rows.cu),
        top_k=None if metadata.top_k is None else metadata.top_k[:n],
        top_p=None if metadata.top_p is None else metadata.top_p[:n],
        min_p=torch.from_numpy(min_p) if min_p.any() else None,
        edited=edited,
        proposals=proposals,
    ).to_host()
