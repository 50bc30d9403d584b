"""What a drafter is. Anything that can guess the next tokens of a sample can be one.

Under coupled sampling a guess can be as good or as bad as it likes: verification keeps exactly the tokens that
the policy would have sampled anyway. A drafter therefore owes nobody correctness, only honest predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from services.drafts.rollout import Rollout
from services.generation.engine.types import SampleState


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What is known of a sample when it starts.

    `given` is a guess of the whole response, position-aligned; empty when there is none. `source` says where it
    comes from: given (by the caller), pregenerated or history. Run and prompt name the prompt, and seed and
    version the sample among all of the prompt, for drafters that keep history; without a run the sample has no
    name beyond its own id. `carried` is what drafters of its last engine knew of it, by name (see `Carrying`).
    """

    sample_id: str
    prompt: Sequence[int]
    given: Sequence[int] = ()
    prompt_id: str = ""
    run_id: str = ""
    seed: int = 0
    version: int = 0
    source: str = "given"
    carried: Mapping[str, bytes] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """The offers of one drafter for the n samples of a step, of at most w tokens each.

    tokens [n, w] integers, and acceptance [n, w] float64: for each the probability that it is accepted if all
    before it are. The first 0 ends an offer; a token there or behind it is none. `sources` [n] are what results and
    metrics call their origins, an empty one being the drafter's name; without any all are.
    """

    tokens: NDArray[np.int32]
    acceptance: NDArray[np.float64]
    sources: Sequence[str] = ()

    @classmethod
    def of(cls, made: Sequence[Offer | None]) -> Self:
        """From one offer for each sample, None where there is none."""
        width = max((len(offer.tokens) for offer in made if offer is not None), default=0)
        tokens, acceptance = np.zeros((len(made), width), np.int32), np.zeros((len(made), width))
        for i, offer in enumerate(made):
            if offer is not None:
                tokens[i, : len(offer.tokens)] = offer.tokens
                acceptance[i, : len(offer.tokens)] = offer.acceptance
        return cls(tokens, acceptance, ["" if offer is None else offer.source for offer in made])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Offer | None:
        """The offer for one sample."""
        ends = np.flatnonzero(self.acceptance[i] == 0)
        length = int(ends[0]) if len(ends) else self.acceptance.shape[1]
        if not length:
            return None
        return Offer(self.tokens[i, :length].tolist(), self.acceptance[i, :length].tolist(), self.source(i))

    def source(self, i: int) -> str:
        """The origin of one sample's offer."""
        return self.sources[i] if self.sources else ""

    def only(self, wanted: Sequence[bool]) -> Self:
        """Those for some of the samples, [n]."""
        return type(self)(self.tokens, self.acceptance * np.asarray(wanted)[:, None], self.sources)


class Drafter(Protocol):
    """Offers tokens for the samples of a step, and learns what became of them.

    Called from the engine thread only, in the order begin, (offer, learn)*, end for each sample; adopt and tend
    come at any time between two steps. An exception or offers that break the rules cost the drafter its say in that
    step, and after some such steps for good.
    """

    name: str

    def begin(self, context: DraftContext) -> None:
        """A sample starts."""

    def adopt(self, arrival: Arrival) -> None:
        """Rollouts have become known; samples that can follow one may be anywhere in their responses."""

    def offer(self, samples: Sequence[SampleState], window: int) -> Offers | None:
        """Offers of at most `window` tokens for the samples, in their order; None where it has no guess for any."""

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Of its `drafted` tokens for this sample in the last step, the first `accepted` were kept."""

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """A sample is over, with this response."""

    def tend(self) -> bool:
        """A slice of work that need not be done in a step, while the engine idles; whether there is more."""


@runtime_checkable
class SequentialDrafter(Drafter, Protocol):
    """A drafter that pays for every token that it makes, and so asks what the others have before it does."""

    def offer_beside(
        self, samples: Sequence[SampleState], window: int, others: Mapping[str, Offers | None]
    ) -> Offers | None:
        """As `offer`, which is not called; `others` are the offers of those that were asked first, by name."""


@runtime_checkable
class Carrying(Protocol):
    """A drafter that knows more of a sample than its tokens, and takes it along to another engine."""

    def carry(self, sample_id: str) -> bytes:
        """What `begin` finds there in `DraftContext.carried` under the drafter's name; empty: nothing."""
