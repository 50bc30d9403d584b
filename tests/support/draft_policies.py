"""Where the drafts of an exactness test come from: good ones, bad ones, and ones that change all the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from services.generation.drafting.drafter import Offer, Offers
from services.generation.drafting.planner import PlannedDrafts
from services.generation.engine.types import SampleState
from services.policy.correction import CorrectedStepTime, Correction
from services.policy.step_time import Architecture, StepTime

PLANNED = "planned"
# The planner's choice of `POLICIES`, by a machine on which a row costs a hundredth of a step.
_STEP_TIME = StepTime(
    architecture=Architecture(weight_bytes=1e9, kv_bytes=1e4, dense_flops=1e9, attention_flops=1e3),
    throughput=1e14,
    bandwidth=1e12,
    per_row=1e-5,
)


@dataclass(frozen=True, slots=True)
class Drafts:
    """A policy by name, its window, and what it may know of the truth: sample id -> whole response."""

    policy: str = "none"
    window: int = 8
    seed: int = 0
    truth: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Drafting:
    """A policy at work on the samples of one scenario."""

    drafts: Drafts
    vocab_size: int
    random: Random = field(init=False)
    steps: int = 0
    planner: PlannedDrafts = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.drafts.seed)
        self.planner = PlannedDrafts(self.drafts.window, CorrectedStepTime(_STEP_TIME, Correction()))

    def __call__(self, samples: Sequence[SampleState]) -> dict[str, list[int]]:
        """The drafts of a step, by sample id."""
        self.steps += 1
        if self.drafts.policy == PLANNED:
            return self._planned(samples)
        policy = POLICIES[self.drafts.policy]
        made = {sample.sample_id: policy(self, sample)[: max(sample.room, 0)] for sample in samples}
        return {sample_id: tokens for sample_id, tokens in made.items() if tokens}

    def _planned(self, samples: Sequence[SampleState]) -> dict[str, list[int]]:
        """What the planner makes of good offers that change all the time and of sure ones that are late."""
        offers = {
            name: Offers.of([_offer(POLICIES[name](self, each)) for each in samples])
            for name in ("varying", "stale")
        }
        return {name: draft.tokens for name, draft in self.planner.choose(samples, offers).items()}

    def true(self, sample: SampleState, count: int) -> list[int]:
        """The next tokens that the sample will have."""
        here = len(sample.response)
        return list(self.drafts.truth[sample.sample_id][here : here + count])

    def other(self, token: int) -> int:
        """Some other token."""
        return (token + self.random.randrange(1, self.vocab_size)) % self.vocab_size

    def any(self, count: int) -> list[int]:
        """Tokens that know nothing."""
        return [self.random.randrange(self.vocab_size) for _ in range(count)]


def _offer(tokens: list[int]) -> Offer | None:
    return Offer(tokens, [0.9] * len(tokens)) if tokens else None


def _none(drafting: Drafting, sample: SampleState) -> list[int]:
    return []


def _true(drafting: Drafting, sample: SampleState) -> list[int]:
    return drafting.true(sample, drafting.drafts.window)


def _random(drafting: Drafting, sample: SampleState) -> list[int]:
    return drafting.any(drafting.drafts.window)


def _adversarial(drafting: Drafting, sample: SampleState) -> list[int]:
    """Right, right, wrong, right: what follows a wrong token must not be taken, however right it is."""
    tokens = drafting.true(sample, drafting.drafts.window)
    return [drafting.other(token) if i % 4 == 2 else token for i, token in enumerate(tokens)]


def _varying(drafting: Drafting, sample: SampleState) -> list[int]:
    """Another length for every sample and step, one token in ten wrong."""
    tokens = drafting.true(sample, drafting.random.randrange(drafting.drafts.window + 1))
    return [drafting.other(token) if drafting.random.random() < 0.1 else token for token in tokens]


def _flipping(drafting: Drafting, sample: SampleState) -> list[int]:
    """On and off at random: for all samples in one step out of two, and for each sample by itself."""
    all_on = Random(drafting.drafts.seed * 7919 + drafting.steps).random() < 0.5
    return _true(drafting, sample) if all_on and drafting.random.random() < 0.8 else []


def _stale(drafting: Drafting, sample: SampleState) -> list[int]:
    """Right tokens in the wrong place: the truth, one token late."""
    return drafting.true(sample, drafting.drafts.window + 1)[1:]


POLICIES: dict[str, Callable[[Drafting, SampleState], list[int]]] = {
    "none": _none,
    "true": _true,
    "random": _random,
    "adversarial": _adversarial,
    "varying": _varying,
    "flipping": _flipping,
    "stale": _stale,
}
