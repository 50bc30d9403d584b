"""Verify and sample by the kernels on the device; only tokens and log-probabilities leave it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.metadata import SamplingMetadata

from kernels.backend import Backend, choose
from kernels.coupled_sampler.sample import sample
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.types import Verifier


@dataclass(frozen=True, slots=True)
class Drawn:
    """As kernels.coupled_sampler.sample.Sampled, in host memory."""

    tokens: IntArray
    counts: IntArray
    logprobs: npt.NDArray[np.float32]
    processed: npt.NDArray[np.float32]


def samples_on(device: torch.device, noise: list[SampleNoise]) -> bool:
    """Return whether the kernels sample this batch: they are on, and no sample is verified by rejection."""
    return choose(device) is Backend.TRITON and not any(item.verifier is Verifier.REJECTION for item in noise)


def only_masked(metadata: SamplingMetadata, noise: list[SampleNoise]) -> bool:
    """Return whether samples ask for nothing but temperature, top-k and top-p, which the kernels do."""
    return metadata.no_penalties and not any(item.by_row for item in noise)


def draw(
    logits: torch.Tensor,
    rows: Rows,
    temperature: torch.Tensor,
    noise: list[SampleNoise],
    metadata: SamplingMetadata | None = None,
) -> Drawn:
    """Sample and verify all rows: one copy to the device, which is not waited for, and one from it, which is.

    Args:
        logits: [R, V], any float type.
        rows: the layout.
        temperature: what the logits are still to be divided by, [n] float32 here or on the device; 0 is greedy.
        noise: one per sample.
        metadata: with the top-k and top-p masks that are still to be applied.
    """
    n = len(noise)
    seeds = np.fromiter((item.seed for item in noise), np.uint64, n).view(np.int64)
    drawn = sample(
        logits,
        torch.from_numpy(seeds),
        torch.from_numpy(rows.positions),
        temperature,
        torch.from_numpy(rows.drafts),
        torch.from_numpy(rows.cu),
        top_k=None if metadata is None or metadata.top_k is None else metadata.top_k[:n],
        top_p=None if metadata is None or metadata.top_p is None else metadata.top_p[:n],
    ).to_host()
    return Drawn(*(part.numpy() for part in (drawn.tokens, drawn.counts, drawn.logprobs, drawn.processed)))
