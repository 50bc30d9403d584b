"""What a drafter is. Anything that can guess the next tokens of a sample can be one.

Under coupled sampling a guess can be as good or as bad as it likes: verification keeps exactly the tokens that
the policy would have sampled anyway. A drafter therefore owes nobody correctness, only honest predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.drafts.rollout import Rollout
from services.generation.engine.types import SampleState


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What is known of a sample when it starts.

    `given` is a guess of the whole response, position-aligned; empty when there is none. `source` says where it
    comes from: given (by the caller), pregenerated or history. Run and prompt name the prompt, and seed and
    version the sample among all of the prompt, for drafters that keep history; without a run the sample has no
    name beyond its own id.
    """

    sample_id: str
    prompt: Sequence[int]
    given: Sequence[int] = ()
    prompt_id: str = ""
    run_id: str = ""
    seed: int = 0
    version: int = 0
    source: str = "given"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rollouts that have become known between two steps, and those that running samples can follow, by id."""

    rollouts: Sequence[Rollout] = ()
    given: Mapping[str, Rollout] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer:
    """Guessed next tokens, [k], and for each the probability that it is accepted if all before it are, [k].

    `source` is what results and metrics call their origin; empty: the drafter's name.
    """

    tokens: Sequence[int]
    acceptance: Sequence[float]
    source: str = ""

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

    Called from the engine thread only, in the order begin, (offer, learn)*, end for each sample; adopt and tend
    come at any time between two steps. An exception or an offer that breaks the rules costs the drafter its say
    in that step, and after some such steps for good.
    """

    name: str

    def begin(self, context: DraftContext) -> None:
        """A sample starts."""

    def adopt(self, arrival: Arrival) -> None:
        """Rollouts have become known; samples that can follow one may be anywhere in their responses."""

    def offer(self, samples: Sequence[SampleState], window: int) -> Sequence[Offer | None]:
        """One offer of at most `window` tokens for each sample, in their order; None where it has no guess."""

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Of its `drafted` tokens for this sample in the last step, the first `accepted` were kept."""

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """A sample is over, with this response."""

    def tend(self) -> bool:
        """A slice of work that need not be done in a step, while the engine idles; whether there is more."""
