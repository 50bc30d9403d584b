"""A drafter that runs a model of its own: when, for whom, and what it learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

import pytest

from services.contracts.knobs import Knobs
from services.generation.drafters.draft_model import AcceptanceCounts, DraftModelDrafter
from services.generation.engine.types import DraftResult, EngineSampleState, ModelProposal
from services.generation.speculation.drafter import Proposal, Proposals
from services.generation.speculation.planner import KnobDrivenPlanner
from tests.support.proposals import proposal_of
from tests.support.step_times import KnownStepTime

_STEP: Any = KnownStepTime(weights=1e-2, row=1e-4, per_row=1e-5)


@dataclass
class FakeDraftModel:
    """A draft model that says 100, 101, 102, ... from the response's length on, and can be stale."""

    name: str = "quantized"
    most_tokens: int = 4
    ready: bool = True
    building: bool = False
    slices: int = 0
    nbytes: int = 1234
    probability: float = 0.9
    caught_up: int = 0
    requests: list[dict[str, int]] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)

    def build(self, seconds: float) -> bool:
        if self.building:
            self.slices -= 1
            self.building = self.slices > 0
            self.ready = not self.building
        return self.ready

    def stale(self, slices: int) -> None:
        self.ready, self.building, self.slices = False, True, slices

    def propose(self, lengths: Mapping[str, int]) -> DraftResult:
        assert self.ready
        self.requests.append(dict(lengths))
        made = {
            key: ModelProposal(
                [100 + self.lengths[key] + i for i in range(count)], [log(self.probability)] * count
            )
            for key, count in lengths.items()
        }
        return DraftResult(made, self.caught_up)


class Terms(KnobDrivenPlanner):
    """The planner of an instance, which says for whom the drafter is wanted; by default every step drafts."""

    def __init__(self, mode: Any = "fixed", allowed: Sequence[bool] | bool = True) -> None:
        super().__init__(Knobs(mode=mode), _STEP, lambda _: None)
        self.allowed = allowed

    def wants(self, drafter: str, samples: Sequence[EngineSampleState]) -> Sequence[bool] | bool:
        assert drafter == "quantized"
        return self.allowed


@dataclass
class Metrics:
    built_: list[tuple[float, float, int]] = field(default_factory=list)
    drafted_: list[tuple[int, int]] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def built(self, work: float, wall: float, nbytes: int) -> None:
        self.built_.append((work, wall, nbytes))

    def decided(self, gain: float) -> None:
        self.gains.append(gain)

    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None:
        self.drafted_.append((tokens, steps))

    def swapped(self, version: int) -> None:
        self.versions.append(version)


class Clock:
    """A second passes with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def _sample(draft_model: FakeDraftModel, name: str, response: list[int], room: int = 50) -> EngineSampleState:
    draft_model.lengths[name] = len(response)
    return EngineSampleState(name, [1, 2], response, room, 2 + len(response))


def _truth(length: int) -> list[int]:
    return [100 + i for i in range(length)]


def _tokens(proposals: Proposals | None, i: int) -> list[int] | None:
    proposal = None if proposals is None else proposal_of(proposals, i)
    return None if proposal is None else list(proposal.tokens)


def test_without_a_step_time_model_everybody_is_drafted_for() -> None:
    draft_model = FakeDraftModel()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)
    assert drafter.sequential
    samples = [
        _sample(draft_model, "a", []),
        _sample(draft_model, "b", [7], room=2),
        _sample(draft_model, "c", [7], room=0),
    ]
    proposals = drafter.propose(samples, 8, {})
    assert draft_model.requests == [{"a": 4, "b": 2}]
    assert [_tokens(proposals, i) for i in range(3)] == [[100, 101, 102, 103], [101, 102], None]


def test_samples_with_better_proposals_are_not_drafted_for() -> None:
    draft_model = FakeDraftModel()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)
    samples = [_sample(draft_model, "a", []), _sample(draft_model, "b", [])]
    sure = Proposals.of([Proposal([5, 6, 7, 8], [0.99] * 4), Proposal([5], [0.2])])
    proposals = drafter.propose(samples, 8, {"reference": sure})
    assert draft_model.requests == [{"b": 4}]
    assert _tokens(proposals, 0) is None


def test_what_was_not_verified_is_offered_again_while_it_is_right() -> None:
    draft_model = FakeDraftModel()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)
    drafter.propose([_sample(draft_model, "a", [])], 8, {})
    # One token further, as drafted: three are left, and more than what others have.
    proposals = drafter.propose([_sample(draft_model, "a", _truth(1))], 8, {})
    assert _tokens(proposals, 0) == [101, 102, 103, 104]
    assert len(draft_model.requests) == 2
    draft_model.most_tokens = 0
    again = drafter.propose([_sample(draft_model, "a", _truth(2))], 8, {})
    assert _tokens(again, 0) == [102, 103, 104]
    assert _tokens(drafter.propose([_sample(draft_model, "a", [*_truth(2), 9])], 8, {}), 0) is None


def test_acceptance_is_learned_from_tokens_that_were_never_verified() -> None:
    draft_model = FakeDraftModel(probability=0.01)
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)
    prior = drafter.propose([_sample(draft_model, "a", [])], 8, {})
    assert prior is not None
    for i in range(40):
        drafter.propose([_sample(draft_model, f"s{i}", [])], 8, {})
        # The whole draft came true though nobody was told that it was verified.
        drafter.end(f"s{i}", _truth(4))
    good = drafter.propose([_sample(draft_model, "good", [])], 8, {})
    assert good is not None
    assert (good.acceptance > prior.acceptance).all()
    assert good.acceptance.min() > 0.9
    for i in range(400):
        drafter.propose([_sample(draft_model, f"t{i}", [])], 8, {})
        drafter.end(f"t{i}", [9])
    bad = drafter.propose([_sample(draft_model, "bad", [])], 8, {})
    assert bad is not None
    assert bad.acceptance.max() < 0.5


def test_a_stale_copy_is_built_in_slices_and_proposes_nothing_meanwhile() -> None:
    draft_model, metrics = FakeDraftModel(), Metrics()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths, metrics=metrics, clock=Clock())
    assert metrics.built_ == [(0.0, 0.0, 1234)]
    drafter.propose([_sample(draft_model, "a", [])], 8, {})
    draft_model.stale(3)
    # What was drafted by the old weights is not offered any more.
    assert drafter.propose([_sample(draft_model, "a", _truth(1))], 8, {}) is None
    assert drafter.idle_work() is True
    assert drafter.idle_work() is False
    work, wall, _ = metrics.built_[-1]
    assert 0 < work <= wall
    assert drafter.idle_work() is False
    assert len(metrics.built_) == 2
    assert _tokens(drafter.propose([_sample(draft_model, "a", _truth(1))], 8, {}), 0) == [101, 102, 103, 104]


def test_a_draft_model_that_nobody_makes_does_not_keep_the_engine_awake() -> None:
    draft_model = FakeDraftModel(ready=False)
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)
    assert drafter.idle_work() is False
    assert drafter.propose([_sample(draft_model, "a", [])], 8, {}) is None


def test_new_weights_give_a_drafter_that_did_not_pay_another_chance() -> None:
    draft_model = FakeDraftModel()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)
    for i in range(400):
        drafter.propose([_sample(draft_model, f"s{i}", [])], 8, {})
        drafter.end(f"s{i}", [9])
    low = drafter.propose([_sample(draft_model, "a", [])], 8, {})
    draft_model.stale(1)
    drafter.idle_work()
    high = drafter.propose([_sample(draft_model, "b", [])], 8, {})
    assert low is not None
    assert high is not None
    assert low.acceptance[0, 0] < 0.1 < 0.4 < high.acceptance[0, 0]


@pytest.mark.parametrize("allowed", [False, [False, True]])
def test_only_samples_that_want_it_are_drafted_for(allowed: Sequence[bool] | bool) -> None:
    draft_model = FakeDraftModel()
    drafter = DraftModelDrafter(draft_model, Terms(allowed=allowed).draft_lengths)
    drafter.propose([_sample(draft_model, "a", []), _sample(draft_model, "b", [])], 8, {})
    assert draft_model.requests == ([] if allowed is False else [{"b": 4}])


def test_draft_steps_that_do_not_pay_are_not_made() -> None:
    for seconds, mode, pays in ((2e-3, "planner", True), (1e-2, "planner", False), (1e-2, "fixed", True)):
        draft_model = FakeDraftModel()
        drafter = DraftModelDrafter(draft_model, Terms(mode).draft_lengths)
        for _ in range(4):
            drafter.pass_time.observe(4, 4, 8, seconds)
        drafter.propose([_sample(draft_model, f"s{i}", []) for i in range(4)], 8, {})
        assert bool(draft_model.requests) is pays, (seconds, mode)


def test_measured_draft_steps_are_believed() -> None:
    """A clock by which every draft takes a second: that never pays again, whatever the model said."""
    draft_model, metrics = FakeDraftModel(), Metrics()
    drafter = DraftModelDrafter(draft_model, Terms("planner").draft_lengths, metrics=metrics, clock=Clock())
    for i in range(20):
        drafter.propose([_sample(draft_model, f"s{i}", [])], 8, {})
    assert 1 <= len(draft_model.requests) < 10
    assert metrics.drafted_[0] == (2, 2)
    assert metrics.gains[0] > 1
    assert metrics.gains[-1] == 1


def test_what_became_of_drafts_is_counted() -> None:
    draft_model = FakeDraftModel()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)

    def draft(name: str, response: list[int]) -> None:
        drafter.propose([_sample(draft_model, name, [])], 8, {})
        drafter.end(name, response)

    draft("all", _truth(6))
    draft("two", [*_truth(2), 9, 9, 9])
    draft("none", [9])
    # The sample ended before its draft did: of what is behind nothing is known.
    draft("short", _truth(3))
    draft("unknown", [])
    assert drafter.compared == AcceptanceCounts(drafts=4, tokens=4 + 4 + 4 + 3, accepted=4 + 2 + 0 + 3)


def test_a_draft_that_another_follows_counts_as_far_as_it_was_compared() -> None:
    draft_model = FakeDraftModel()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths)
    drafter.propose([_sample(draft_model, "a", [])], 8, {})
    drafter.propose([_sample(draft_model, "a", _truth(3))], 8, {})
    assert drafter.compared == AcceptanceCounts(drafts=1, tokens=3, accepted=3)


def test_other_weights_of_the_model_begin_a_new_count_and_forget_what_was_drafted() -> None:
    draft_model, metrics = FakeDraftModel(), Metrics()
    drafter = DraftModelDrafter(draft_model, Terms().draft_lengths, metrics=metrics)
    for i in range(400):
        drafter.propose([_sample(draft_model, f"s{i}", [])], 8, {})
        drafter.end(f"s{i}", [9])
    low = drafter.propose([_sample(draft_model, "a", [])], 8, {})
    drafter.swapped(7)
    assert (drafter.compared, metrics.versions) == (AcceptanceCounts(), [7])
    drafter.end("a", _truth(4))
    assert drafter.compared == AcceptanceCounts()
    high = drafter.propose([_sample(draft_model, "b", [])], 8, {})
    assert low is not None
    assert high is not None
    assert low.acceptance[0, 0] < 0.1 < 0.4 < high.acceptance[0, 0]


def test_a_step_in_which_samples_caught_up_teaches_no_times() -> None:
    """By its clock drafting never pays, but that was reading."""
    draft_model = FakeDraftModel(caught_up=1000)
    drafter = DraftModelDrafter(draft_model, Terms("planner").draft_lengths, clock=Clock())
    for i in range(20):
        drafter.propose([_sample(draft_model, f"s{i}", [])], 8, {})
    assert len(draft_model.requests) == 20
