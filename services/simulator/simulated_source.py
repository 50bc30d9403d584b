"""Sources of draft tokens, as a simulation knows them: how likely tokens are accepted, and what drafting costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.simulator.device_tables import DeviceTable

Floats = NDArray[np.float64]
PREGENERATED = "pregenerated"
"""Name of the source that a sample has only as far as its own draft reaches."""


@dataclass(frozen=True, slots=True)
class SimulatedSource:
    """Source of drafts with the same acceptance for all samples.

    `acceptance` is the probability that a token is accepted if all before it in its draft are; a sequence has one
    for each position, the last of which holds from there on. `passes` are the step times of a draft model, which
    makes a token a pass; None for a source that looks tokens up, which takes no time.
    """

    name: str
    acceptance: float | tuple[float, ...]
    passes: DeviceTable | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.each or not all(0 <= each <= 1 for each in self.each):
            raise ValueError(
                f"acceptance of {self.name or 'a source'} must be between 0 and 1, not {self.acceptance}"
            )

    @property
    def each(self) -> tuple[float, ...]:
        """Acceptance by position."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    def by_position(self, width: int) -> Floats:
        """Return the acceptance of the first `width` positions."""
        places = np.minimum(np.arange(width), len(self.each) - 1)
        return np.array(self.each, np.float64)[places]
