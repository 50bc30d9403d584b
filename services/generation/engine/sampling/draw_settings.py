"""Temperature and masks by probability of the samples of a step, as the sampler reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.generation.engine.sampling.noise import SampleNoise


class DrawSettings(NamedTuple):
    """Settings of n samples, in host memory.

    temperature [n] float32, 0 for a greedy sample; top_k [n] integers and top_p [n] float32, None where no sample
    asks for it.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.integer] | None = None
    top_p: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(cls, noise: Sequence[SampleNoise]) -> DrawSettings:
        """Return those of samples as they ask for them: vLLM's batch has what its own limits make of that."""
        n = len(noise)
        top_k = np.fromiter((each.top_k for each in noise), np.int64, n)
        top_p = np.fromiter((each.top_p for each in noise), np.float32, n)
        return cls(
            np.fromiter((each.temperature for each in noise), np.float32, n),
            top_k if top_k.any() else None,
            top_p if (top_p < 1).any() else None,
        )

    @property
    def divisor(self) -> npt.NDArray[np.float32]:
        """Divisor of the logits of each sample; 1 for greedy ones."""
        return np.where(self.temperature > 0, self.temperature, np.float32(1))
