"""A drafter that runs a model of its own: when, for whom, and what it learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log

import pytest

from services.generation.drafting.drafter import Offer, Offers, SequentialDrafter
from services.generation.drafting.own_model import Compared, OwnModelDrafter
from services.generation.engine.types import Drafted, Proposal, SampleState
from services.policy.correction import CorrectedStepTime, Correction
from services.policy.drafter_time import DrafterTime
from services.policy.knobs import Knobs
from services.policy.step_time import Architecture, StepTime

_ARCHITECTURE = Architecture(weight_bytes=1e10, kv_bytes=1e4, dense_flops=1e10, attention_flops=1e3)
_STEP = StepTime(architecture=_ARCHITECTURE, throughput=1e14, bandwidth=1e12, per_row=1e-5)


@dataclass
class Twin:
    """A twin that says 100, 101, 102, ... from the response's length on, and can be stale."""

    name: str = "self_w4"
    most_tokens: int = 4
    ready: bool = True
    building: bool = False
    slices: int = 0
    nbytes: int = 1234
    probability: float = 0.9
    caught_up: int = 0
    asked: list[dict[str, int]] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)

    def build(self, seconds: float) -> bool:
        if self.building:
            self.slices -= 1
            self.building = self.slices > 0
            self.ready = not self.building
        return self.ready

    def stale(self, slices: int) -> None:
        self.ready, self.building, self.slices = False, True, slices

    def propose(self, lengths: Mapping[str, int]) -> Drafted:
        assert self.ready
        self.asked.append(dict(lengths))
        made = {
            key: Proposal(
                [100 + self.lengths[key] + i for i in range(count)], [log(self.probability)] * count
            )
            for key, count in lengths.items()
        }
        return Drafted(made, self.caught_up)


@dataclass
class Terms:
    step_time: CorrectedStepTime | None = None
    knobs: Knobs = field(default_factory=Knobs)
    allowed: Sequence[bool] | bool = True

    def wanted(self, drafter: str, samples: Sequence[SampleState]) -> Sequence[bool] | bool:
        assert drafter == "self_w4"
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


def _sample(twin: Twin, name: str, response: list[int], room: int = 50) -> SampleState:
    twin.lengths[name] = len(response)
    return SampleState(name, [1, 2], response, room)


def _truth(length: int) -> list[int]:
    return [100 + i for i in range(length)]


def _tokens(offers: Offers | None, i: int) -> list[int] | None:
    offer = None if offers is None else offers[i]
    return None if offer is None else list(offer.tokens)


def test_without_a_step_time_model_everybody_is_drafted_for() -> None:
    twin = Twin()
    drafter = OwnModelDrafter(twin, Terms())
    assert isinstance(drafter, SequentialDrafter)
    samples = [_sample(twin, "a", []), _sample(twin, "b", [7], room=2), _sample(twin, "c", [7], room=0)]
    offers = drafter.offer(samples, 8)
    assert twin.asked == [{"a": 4, "b": 2}]
    assert [_tokens(offers, i) for i in range(3)] == [[100, 101, 102, 103], [101, 102], None]


def test_samples_with_better_offers_are_not_drafted_for() -> None:
    twin = Twin()
    drafter = OwnModelDrafter(twin, Terms())
    samples = [_sample(twin, "a", []), _sample(twin, "b", [])]
    sure = Offers.of([Offer([5, 6, 7, 8], [0.99] * 4), Offer([5], [0.2])])
    offers = drafter.offer_beside(samples, 8, {"given": sure})
    assert twin.asked == [{"b": 4}]
    assert _tokens(offers, 0) is None


def test_what_was_not_verified_is_offered_again_while_it_is_right() -> None:
    twin = Twin()
    drafter = OwnModelDrafter(twin, Terms())
    drafter.offer([_sample(twin, "a", [])], 8)
    # One token further, as drafted: three are left, and more than what others have.
    offers = drafter.offer_beside([_sample(twin, "a", _truth(1))], 8, {})
    assert _tokens(offers, 0) == [101, 102, 103, 104]
    assert len(twin.asked) == 2
    twin.most_tokens = 0
    again = drafter.offer_beside([_sample(twin, "a", _truth(2))], 8, {})
    assert _tokens(again, 0) == [102, 103, 104]
    assert _tokens(drafter.offer_beside([_sample(twin, "a", [*_truth(2), 9])], 8, {}), 0) is None


def test_acceptance_is_learned_from_tokens_that_were_never_verified() -> None:
    twin = Twin(probability=0.01)
    drafter = OwnModelDrafter(twin, Terms())
    prior = drafter.offer([_sample(twin, "a", [])], 8)
    assert prior is not None
    for i in range(40):
        drafter.offer([_sample(twin, f"s{i}", [])], 8)
        # The whole draft came true though nobody was told that it was verified.
        drafter.end(f"s{i}", _truth(4))
    good = drafter.offer([_sample(twin, "good", [])], 8)
    assert good is not None
    assert (good.acceptance > prior.acceptance).all()
    assert good.acceptance.min() > 0.9
    for i in range(400):
        drafter.offer([_sample(twin, f"t{i}", [])], 8)
        drafter.end(f"t{i}", [9])
    bad = drafter.offer([_sample(twin, "bad", [])], 8)
    assert bad is not None
    assert bad.acceptance.max() < 0.5


def test_a_stale_twin_is_built_in_slices_and_offers_nothing_meanwhile() -> None:
    twin, metrics = Twin(), Metrics()
    drafter = OwnModelDrafter(twin, Terms(), metrics=metrics, clock=Clock())
    assert metrics.built_ == [(0.0, 0.0, 1234)]
    drafter.offer([_sample(twin, "a", [])], 8)
    twin.stale(3)
    # What was drafted by the old weights is not offered any more.
    assert drafter.offer([_sample(twin, "a", _truth(1))], 8) is None
    assert drafter.tend() is True
    assert drafter.tend() is False
    work, wall, _ = metrics.built_[-1]
    assert 0 < work <= wall
    assert drafter.tend() is False
    assert len(metrics.built_) == 2
    assert _tokens(drafter.offer([_sample(twin, "a", _truth(1))], 8), 0) == [101, 102, 103, 104]


def test_a_twin_that_nobody_makes_does_not_keep_the_engine_awake() -> None:
    twin = Twin(ready=False)
    drafter = OwnModelDrafter(twin, Terms())
    assert drafter.tend() is False
    assert drafter.offer([_sample(twin, "a", [])], 8) is None


def test_new_weights_give_a_drafter_that_did_not_pay_another_chance() -> None:
    twin = Twin()
    drafter = OwnModelDrafter(twin, Terms())
    for i in range(400):
        drafter.offer([_sample(twin, f"s{i}", [])], 8)
        drafter.end(f"s{i}", [9])
    low = drafter.offer([_sample(twin, "a", [])], 8)
    twin.stale(1)
    drafter.tend()
    high = drafter.offer([_sample(twin, "b", [])], 8)
    assert low is not None
    assert high is not None
    assert low.acceptance[0, 0] < 0.1 < 0.4 < high.acceptance[0, 0]


@pytest.mark.parametrize("allowed", [False, [False, True]])
def test_only_samples_that_want_it_are_drafted_for(allowed: Sequence[bool] | bool) -> None:
    twin = Twin()
    drafter = OwnModelDrafter(twin, Terms(allowed=allowed))
    drafter.offer([_sample(twin, "a", []), _sample(twin, "b", [])], 8)
    assert twin.asked == ([] if allowed is False else [{"b": 4}])


def _timed(weight_bytes: float, mode: str = "planner") -> tuple[Terms, DrafterTime]:
    terms = Terms(CorrectedStepTime(_STEP, Correction()), Knobs.model_validate({"mode": mode}))
    of_draft = _ARCHITECTURE.model_copy(update={"weight_bytes": weight_bytes})
    return terms, DrafterTime(lambda: terms.step_time, of_draft)


def test_draft_steps_that_do_not_pay_are_not_made() -> None:
    for weight_bytes, mode, pays in (
        (2e9, "planner", True),
        (1e10, "planner", False),
        (1e10, "fixed", True),
    ):
        twin = Twin()
        drafter = OwnModelDrafter(twin, *_timed(weight_bytes, mode))
        drafter.offer([_sample(twin, f"s{i}", []) for i in range(4)], 8)
        assert bool(twin.asked) is pays, (weight_bytes, mode)


def test_measured_draft_steps_are_believed() -> None:
    """A clock by which every draft takes a second: that never pays again, whatever the model said."""
    twin, metrics = Twin(), Metrics()
    drafter = OwnModelDrafter(twin, *_timed(2e9), metrics=metrics, clock=Clock())
    for i in range(20):
        drafter.offer([_sample(twin, f"s{i}", [])], 8)
    assert 1 <= len(twin.asked) < 10
    assert metrics.drafted_[0] == (4, 4)
    assert metrics.gains[0] > 1
    assert metrics.gains[-1] == 1


def test_what_became_of_drafts_is_counted() -> None:
    twin = Twin()
    drafter = OwnModelDrafter(twin, Terms())

    def draft(name: str, response: list[int]) -> None:
        drafter.offer([_sample(twin, name, [])], 8)
        drafter.end(name, response)

    draft("all", _truth(6))
    draft("two", [*_truth(2), 9, 9, 9])
    draft("none", [9])
    # The sample ended before its draft did: of what is behind nothing is known.
    draft("short", _truth(3))
    draft("unknown", [])
    assert drafter.compared == Compared(drafts=4, tokens=4 + 4 + 4 + 3, accepted=4 + 2 + 0 + 3)


def test_a_draft_that_another_follows_counts_as_far_as_it_was_compared() -> None:
    twin = Twin()
    drafter = OwnModelDrafter(twin, Terms())
    drafter.offer([_sample(twin, "a", [])], 8)
    drafter.offer([_sample(twin, "a", _truth(3))], 8)
    assert drafter.compared == Compared(drafts=1, tokens=3, accepted=3)


def test_other_weights_of_the_model_begin_a_new_count_and_forget_what_was_drafted() -> None:
    twin, metrics = Twin(), Metrics()
    drafter = OwnModelDrafter(twin, Terms(), metrics=metrics)
    for i in range(400):
        drafter.offer([_sample(twin, f"s{i}", [])], 8)
        drafter.end(f"s{i}", [9])
    low = drafter.offer([_sample(twin, "a", [])], 8)
    drafter.swapped(7)
    assert (drafter.compared, metrics.versions) == (Compared(), [7])
    drafter.end("a", _truth(4))
    assert drafter.compared == Compared()
    high = drafter.offer([_sample(twin, "b", [])], 8)
    assert low is not None
    assert high is not None
    assert low.acceptance[0, 0] < 0.1 < 0.4 < high.acceptance[0, 0]


def test_a_step_in_which_samples_caught_up_teaches_no_times() -> None:
    """By its clock drafting never pays, but that was reading."""
    twin = Twin(caught_up=1000)
    drafter = OwnModelDrafter(twin, *_timed(2e9), clock=Clock())
    for i in range(20):
        drafter.offer([_sample(twin, f"s{i}", [])], 8)
    assert len(twin.asked) == 20
