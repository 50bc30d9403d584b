"""Settings of the samples in a runner, as the sampler on the device needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams

from services.generation.engine.sampling.noise import NOISE_KEY, SampleNoise

_NO_NOISE: dict[str, Any] = {"seed": 0}


def noise_of(params: SamplingParams) -> SampleNoise:
    """Return how a request is sampled. One of vLLM's own, with which it warms up, says nothing of it."""
    return SampleNoise(**(params.extra_args or {}).get(NOISE_KEY, _NO_NOISE))


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of the samples of a step, one entry a sample, [n], in host memory."""

    samples: Sequence[SampleNoise]
    seeds: torch.Tensor
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64] | None
    top_p: npt.NDArray[np.float32] | None
    min_p: npt.NDArray[np.float32] | None

    @classmethod
    def of(cls, samples: Sequence[SampleNoise]) -> BatchSettings:
        """Return the settings of these samples; `top_k`, `top_p` and `min_p` are None if nobody asks for them."""
        n = len(samples)
        seeds = np.fromiter((each.seed for each in samples), np.uint64, n)
        top_k = np.fromiter((each.top_k for each in samples), np.int64, n)
        top_p = np.fromiter((each.top_p for each in samples), np.float32, n)
        min_p = np.fromiter((each.min_p for each in samples), np.float32, n)
        return cls(
            samples,
            torch.from_numpy(seeds.view(np.int64)),
            np.fromiter((each.temperature for each in samples), np.float32, n),
            top_k if top_k.any() else None,
            top_p if (top_p < 1).any() else None,
            min_p if min_p.any() else None,
        )

    @property
    def divisor(self) -> npt.NDArray[np.float32]:
        """Divisor of the logits of each sample; 1 for greedy ones."""
        return np.where(self.temperature > 0, self.temperature, np.float32(1))
