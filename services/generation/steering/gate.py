"""A drafter that is asked only when it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.generation.drafting.drafter import Arrival, Carrying, DraftContext, Drafter, Offers
from services.generation.engine.types import SampleState

Wanted = Callable[[str, Sequence[SampleState]], Sequence[bool] | bool]
"""Says of a drafter whether it may make offers: for every sample alike, or for each."""


class Gated:
    """Passes everything on but the question for offers, which costs nothing where they are not wanted.

    It is told of samples and rollouts all the same, so that it can be wanted at any time.
    """

    def __init__(self, drafter: Drafter, wanted: Wanted) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._wanted = wanted

    def begin(self, context: DraftContext) -> None:
        """See `Drafter`."""
        self._drafter.begin(context)

    def carry(self, sample_id: str) -> bytes:
        """See `Carrying`."""
        return self._drafter.carry(sample_id) if isinstance(self._drafter, Carrying) else b""

    def adopt(self, arrival: Arrival) -> None:
        """See `Drafter`."""
        self._drafter.adopt(arrival)

    def offer(self, samples: Sequence[SampleState], window: int) -> Offers | None:
        """See `Drafter`."""
        wanted = self._wanted(self.name, samples)
        if wanted is True:
            return self._drafter.offer(samples, window)
        if wanted is False or not any(wanted):
            return None
        # All are asked: which samples share a step must not change what a drafter keeps of them.
        offers = self._drafter.offer(samples, window)
        return None if offers is None else offers.only(wanted)

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """See `Drafter`."""
        self._drafter.learn(sample_id, drafted, accepted)

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """See `Drafter`."""
        self._drafter.end(sample_id, response)

    def tend(self) -> bool:
        """See `Drafter`."""
        return self._drafter.tend()
