"""Temperature and masks by probability of the samples of a step, as the sampler reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.generation.engine.sampling.rows import IntArray


class DrawSettings(NamedTuple):
    """Settings of n samples, in host memory.

    temperature [n] float32, 0 for a greedy sample; top_k [n] integers and top_p [n] float32, None where no sample
    asks for it.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.integer] | None = None
    top_p: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(cls, batch: Any, places: IntArray | slice) -> DrawSettings:
        """Return those of the samples at some places of vLLM's batch, from its mirrors in host memory.

        The same are on the device, but to read them there would wait for all that it has been given to do.
        """
        top_k, top_p = batch.top_k_cpu[places], batch.top_p_cpu[places]
        return cls(
            batch.temperature_cpu[places],
            top_k if (top_k < batch.vocab_size).any() else None,
            top_p if (top_p < 1).any() else None,
        )

    @property
    def divisor(self) -> npt.NDArray[np.float32]:
        """Divisor of the logits of each sample; 1 for greedy ones."""
        return np.where(self.temperature > 0, self.temperature, np.float32(1))
