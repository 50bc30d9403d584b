"""What a drafter is. Anything that can guess the next tokens of a sample can be one.

Under coupled sampling a guess can be as good or as bad as it likes: verification keeps exactly the tokens that
the policy would have sampled anyway. A drafter therefore owes nobody correctness, only honest predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.generation.engine.types import SampleState


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What is known of a sample when it starts.

    `given` is a guess of the whole response, position-aligned; empty when there is none. `prompt_id` names the
    prompt for drafters that keep history.
    """

    sample_id: str
    prompt: Sequence[int]
    given: Sequence[int] = ()
    prompt_id: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """Guessed next tokens, [k], and for each the probability that it is accepted if all before it are, [k]."""

    tokens: Sequence[int]
    acceptance: Sequence[float]

    @property
    def expected(self) -> float:
        """Expected number of accepted tokens: the sum of the survival products."""
        total, survival = 0.0, 1.0
        for probability in self.acceptance:
            survival *= probability
            total += survival
        return total


class Drafter(Protocol):
    """Offers tokens for the samples of a step, and learns what became of them.

    Called from the engine thread only, in the order begin, (offer, learn)*, end for each sample. An exception
    or an offer that breaks the rules costs the drafter its say in that step, and after some such steps for good.
    """

    name: str

    def begin(self, context: DraftContext) -> None:
        """A sample starts."""

    def offer(self, samples: Sequence[SampleState], window: int) -> Sequence[Offer | None]:
        """One offer of at most `window` tokens for each sample, in their order; None where it has no guess."""

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Of its `drafted` tokens for this sample in the last step, the first `accepted` were kept."""

    def end(self, sample_id: str) -> None:
        """A sample is over."""
