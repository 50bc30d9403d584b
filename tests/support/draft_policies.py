"""Where the drafts of an exactness test come from: good ones, bad ones, and ones that change all the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import Proposal, Proposals
from services.generation.speculation.modes import PlannerMode
from tests.support.draft_trees import random_tree
from tests.support.step_times import planner_mode

TREES = ("trees", MIXED := "mixed", FORKED := "forked")
# Random trees for all samples; trees, chains and nothing; wrong chains beside right branches.
PLANNED = "planned"
# The planner's choice of `POLICIES`, by a machine on which a row costs a hundredth of a step.


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
    planner: PlannerMode = field(init=False)
    parents: dict[str, list[int]] = field(init=False, default_factory=dict)
    """Of the drafts of the last step, where they have branches."""

    def __post_init__(self) -> None:
        self.random = Random(self.drafts.seed)
        self.planner = planner_mode(self.drafts.window)

    def __call__(self, samples: Sequence[EngineSampleState]) -> dict[str, list[int]]:
        """Return the drafts of a step, by sample id."""
        self.steps += 1
        if self.drafts.policy == PLANNED:
            return self._planned(samples) if samples else {}
        self.parents = {}
        if self.drafts.policy in TREES:
            return self._trees(samples)
        policy = POLICIES[self.drafts.policy]
        made = {sample.sample_id: policy(self, sample)[: max(sample.room, 0)] for sample in samples}
        return {sample_id: tokens for sample_id, tokens in made.items() if tokens}

    def _planned(self, samples: Sequence[EngineSampleState]) -> dict[str, list[int]]:
        """What the planner makes of good proposals that change all the time and of sure ones that are late."""
        proposals = {
            name: Proposals.of([_proposal(POLICIES[name](self, each)) for each in samples])
            for name in ("varying", "stale")
        }
        return self.planner.choose(samples, proposals).tokens

    def _trees(self, samples: Sequence[EngineSampleState]) -> dict[str, list[int]]:
        """Return trees for all samples, or for some and chains or nothing for the others."""
        made: dict[str, list[int]] = {}
        for sample in samples:
            if self.drafts.policy == FORKED:
                if right := _unforked(self, sample):
                    made[sample.sample_id] = [self.other(right[0]), right[0], *right]
                    self.parents[sample.sample_id] = [-1, 0, -1, *range(2, len(right) + 1)]
                continue
            if self.drafts.policy == MIXED and self.random.random() < 0.6:
                tokens = (_varying if self.random.random() < 0.7 else _none)(self, sample)[: sample.room]
                made |= {sample.sample_id: tokens} if tokens else {}
                continue
            tree = random_tree(
                self.random, self.true(sample, self.drafts.window), sample.room, self.vocab_size
            )
            if tree.tokens:
                made[sample.sample_id] = list(tree.tokens)
                self.parents[sample.sample_id] = list(tree.parents)
        return made

    def true(self, sample: EngineSampleState, count: int) -> list[int]:
        """Return the next tokens that the sample will have."""
        here = len(sample.response)
        return list(self.drafts.truth[sample.sample_id][here : here + count])

    def other(self, token: int) -> int:
        """Some other token."""
        return (token + self.random.randrange(1, self.vocab_size)) % self.vocab_size

    def any(self, count: int) -> list[int]:
        """Tokens that know nothing."""
        return [self.random.randrange(self.vocab_size) for _ in range(count)]


def _proposal(tokens: list[int]) -> Proposal | None:
    return Proposal(tokens, [0.9] * len(tokens)) if tokens else None


def _none(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    return []


def _true(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    return drafting.true(sample, drafting.drafts.window)


def _random(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    return drafting.any(drafting.drafts.window)


def _adversarial(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    """Right, right, wrong, right: what follows a wrong token must not be taken, however right it is."""
    tokens = drafting.true(sample, drafting.drafts.window)
    return [drafting.other(token) if i % 4 == 2 else token for i, token in enumerate(tokens)]


def _varying(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    """Another length for every sample and step, one token in ten wrong."""
    tokens = drafting.true(sample, drafting.random.randrange(drafting.drafts.window + 1))
    return [drafting.other(token) if drafting.random.random() < 0.1 else token for token in tokens]


def _flipping(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    """On and off at random: for all samples in one step out of two, and for each sample by itself."""
    all_on = Random(drafting.drafts.seed * 7919 + drafting.steps).random() < 0.5
    return _true(drafting, sample) if all_on and drafting.random.random() < 0.8 else []


def _stale(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    """Right tokens in the wrong place: the truth, one token late."""
    return drafting.true(sample, drafting.drafts.window + 1)[1:]


def _unforked(drafting: Drafting, sample: EngineSampleState) -> list[int]:
    """As the branches of `forked`, and as long."""
    return drafting.true(sample, min(drafting.drafts.window, max(sample.room - 2, 0)))


POLICIES: dict[str, Callable[[Drafting, EngineSampleState], list[int]]] = {
    "none": _none,
    "true": _true,
    "random": _random,
    "adversarial": _adversarial,
    "varying": _varying,
    "flipping": _flipping,
    "stale": _stale,
    "unforked": _unforked,
}
