"""The draft planner against all plans there are, and what it promises by its own account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.generation.drafting.drafter import Offer
from services.generation.drafting.plan import Draft, StepShape
from services.generation.drafting.planner import (
    DRAFTS,
    NO_OFFERS,
    NO_SAMPLES,
    PLAIN_IS_BEST,
    WITHIN_MARGIN,
    Decision,
    PlannedDrafts,
)
from services.generation.drafting.planner_metrics import PlannerMetrics
from services.generation.engine.types import SampleState
from services.policy.correction import CorrectedStepTime, Correction
from services.policy.step_time import Architecture, StepTime
from tests.support.offers import batched

ARCHITECTURE = Architecture(weight_bytes=1e9, kv_bytes=1e4, dense_flops=1e9, attention_flops=1e3)
WINDOW = 3
Offers = Mapping[str, Sequence[Offer | None]]


def step_time(**fields: Any) -> CorrectedStepTime:
    """Memory takes 1 ms; a row computes for 1e9 / throughput."""
    chosen = {"throughput": 1e15, "bandwidth": 1e12} | fields
    return CorrectedStepTime(StepTime(architecture=ARCHITECTURE, **chosen), Correction())


def sample(name: int, room: int = 100, context: int = 10) -> SampleState:
    return SampleState(f"s{name}", [1] * context, [], room)


def offer(*acceptance: float, tokens: Sequence[int] = (), source: str = "") -> Offer:
    return Offer(list(tokens) or [7] * len(acceptance), list(acceptance), source)


def plan(window: int = WINDOW, margin: float = 0.0, metrics: Any = None, **fields: Any) -> PlannedDrafts:
    return PlannedDrafts(window, step_time(**fields), margin, metrics)


def promised(
    time: CorrectedStepTime,
    samples: Sequence[SampleState],
    offers: Offers,
    lengths: Sequence[tuple[str, int]],
) -> float:
    """Tokens a second of a plan: for each sample a drafter and a number of its tokens."""
    expected = sum(
        float(np.cumprod(made.acceptance)[:length].sum())
        for i, (name, length) in enumerate(lengths)
        if (made := offers[name][i] if name else None) is not None
    )
    requests = len(samples)
    rows = requests + sum(length for _, length in lengths)
    context = sum(len(each.prompt) + len(each.response) for each in samples)
    return (requests + expected) / float(time.seconds(requests, rows, context))


def all_plans(samples: Sequence[SampleState], offers: Offers) -> Iterator[tuple[tuple[str, int], ...]]:
    """Every choice of drafter and length."""
    choices = [
        [("", 0)]
        + [
            (name, length)
            for name, made in offers.items()
            if (each := made[i]) is not None
            for length in range(1, min(len(each.tokens), max(one.room, 0), WINDOW) + 1)
        ]
        for i, one in enumerate(samples)
    ]
    return product(*choices)


def as_lengths(samples: Sequence[SampleState], drafts: Mapping[str, Draft]) -> list[tuple[str, int]]:
    found = [drafts.get(each.sample_id) for each in samples]
    return [("", 0) if each is None else (each.drafter, len(each.tokens)) for each in found]


probability = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
offer_lists = st.lists(probability, min_size=1, max_size=WINDOW).map(lambda each: offer(*each))
maybe_offers = st.one_of(st.none(), offer_lists)
any_time = st.fixed_dictionaries(
    {
        "throughput": st.floats(1e10, 1e14),
        "base": st.floats(0, 1e-2),
        "per_request": st.floats(0, 1e-3),
        "per_row": st.floats(0, 1e-3),
        "per_attended_token": st.floats(0, 1e-4),
        "verify_per_request": st.floats(0, 1e-3),
    }
)


@st.composite
def batches(draw: st.DrawFn, drafters: int) -> tuple[list[SampleState], dict[str, list[Offer | None]]]:
    size = draw(st.integers(1, 3))
    samples = [sample(i, draw(st.integers(-1, 4))) for i in range(size)]
    names = [f"d{i}" for i in range(drafters)]
    return samples, {name: draw(st.lists(maybe_offers, min_size=size, max_size=size)) for name in names}


@settings(max_examples=200)
@given(batches(1), any_time)
def test_with_one_drafter_the_best_plan_of_all_is_found(
    batch: tuple[list[SampleState], Offers], fields: dict[str, float]
) -> None:
    samples, offers = batch
    planner = plan(**fields)
    found = promised(
        planner.step_time, samples, offers, as_lengths(samples, planner.choose(samples, batched(offers)))
    )
    best = max(promised(planner.step_time, samples, offers, each) for each in all_plans(samples, offers))
    assert found == pytest.approx(best, rel=1e-9)


@settings(max_examples=200)
@given(batches(1), any_time, st.integers(0, 12))
def test_of_plans_within_the_engines_rows_the_best_is_found(
    batch: tuple[list[SampleState], Offers], fields: dict[str, float], capacity: int
) -> None:
    samples, offers = batch
    planner = PlannedDrafts(WINDOW, step_time(**fields))
    drafts = planner.choose(samples, batched(offers), capacity)
    assert drafts.count <= max(0, capacity - len(samples))
    found = promised(planner.step_time, samples, offers, as_lengths(samples, drafts))
    fitting = [
        each
        for each in all_plans(samples, offers)
        if sum(length for _, length in each) <= max(0, capacity - len(samples))
    ]
    assert found == pytest.approx(
        max(promised(planner.step_time, samples, offers, each) for each in fitting), rel=1e-9
    )


@settings(max_examples=200)
@given(batches(2), st.floats(1e-6, 1e-2), st.floats(0, 1e-2))
def test_where_time_grows_with_the_rows_the_best_choice_of_drafters_is_found(
    batch: tuple[list[SampleState], Offers], per_row: float, base: float
) -> None:
    samples, offers = batch
    planner = plan(per_row=per_row, base=base)
    found = promised(
        planner.step_time, samples, offers, as_lengths(samples, planner.choose(samples, batched(offers)))
    )
    best = max(promised(planner.step_time, samples, offers, each) for each in all_plans(samples, offers))
    assert found == pytest.approx(best, rel=1e-9)


@settings(max_examples=300)
@given(batches(3), any_time, st.floats(0, 1))
def test_a_plan_keeps_the_rules_and_is_never_worse_than_plain_decoding(
    batch: tuple[list[SampleState], Offers], fields: dict[str, float], margin: float
) -> None:
    samples, offers = batch
    planner = plan(margin=margin, **fields)
    drafts = planner.choose(samples, batched(offers))
    for i, each in enumerate(samples):
        if each.sample_id not in drafts:
            continue
        name, tokens, source = drafts[each.sample_id]
        made = offers[name][i]
        assert made is not None
        assert 0 < len(tokens) <= min(WINDOW, each.room)
        assert tokens == list(made.tokens[: len(tokens)])
        assert source == name
    plain = promised(planner.step_time, samples, offers, [("", 0)] * len(samples))
    found = promised(planner.step_time, samples, offers, as_lengths(samples, drafts))
    last = planner.last
    assert found >= plain
    assert found / plain == pytest.approx(last.speedup, rel=1e-9)
    assert (last.reason == DRAFTS) == bool(drafts)
    assert last.tokens == sum(len(draft.tokens) for draft in drafts.values())
    if drafts:
        assert last.speedup >= 1 + margin
    assert planner.choose(samples, batched(offers)) == drafts


@given(batches(2), any_time)
def test_a_draft_that_cannot_be_kept_is_not_verified(
    batch: tuple[list[SampleState], Offers], fields: dict[str, float]
) -> None:
    samples, offers = batch
    hopeless = {
        name: [None if each is None else offer(*(0.0 for _ in each.tokens)) for each in made]
        for name, made in offers.items()
    }
    planner = plan(**fields)
    assert planner.choose(samples, batched(hopeless)) == {}
    assert planner.last.reason in (NO_OFFERS, PLAIN_IS_BEST)


def test_an_empty_batch_and_one_without_offers_decode_plainly() -> None:
    planner = plan()
    assert planner.choose([], batched({"a": []})) == {}
    assert planner.last.reason == NO_SAMPLES
    assert planner.choose([sample(0)], batched({"a": [None]})) == {}
    assert planner.last.reason == NO_OFFERS
    assert planner.choose([sample(0)], batched({})) == {}


def test_one_sample_with_memory_to_spare_gets_the_whole_offer() -> None:
    planner = plan()
    drafts = planner.choose(
        [sample(0)], batched({"a": [offer(0.9, 0.9, 0.9, tokens=(3, 4, 5), source="history")]})
    )
    assert drafts == {"s0": Draft("a", [3, 4, 5], "history")}
    assert planner.last.speedup == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert planner.last.seconds == pytest.approx(1e-3, rel=1e-3)


def test_offers_are_cut_to_the_window_and_to_what_the_sample_has_room_for() -> None:
    offers = {"a": [offer(0.9, 0.9, 0.9), offer(0.9, 0.9, 0.9), offer(0.9, 0.9, 0.9)]}
    samples = [sample(0), sample(1, room=1), sample(2, room=-1)]
    assert as_lengths(samples, plan(window=2).choose(samples, batched(offers))) == [
        ("a", 2),
        ("a", 1),
        ("", 0),
    ]


@given(batches(2), any_time)
def test_drafts_say_how_much_sooner_their_tokens_come_than_plain_ones(
    batch: tuple[list[SampleState], Offers], fields: dict[str, float]
) -> None:
    samples, offers = batch
    planner = plan(**fields)
    drafts = planner.choose(samples, batched(offers))
    if drafts:
        requests, context = len(samples), 10 * len(samples)
        step, plain = planner.step_time.seconds(requests, [requests + drafts.count, requests], context)
        as_many = (requests + drafts.expected) / requests * plain
        assert drafts.saved == pytest.approx(as_many - step, rel=1e-6, abs=1e-12)


def test_when_rows_are_dear_nothing_is_drafted() -> None:
    planner = plan(per_row=1.0)
    assert planner.choose([sample(0)], batched({"a": [offer(0.9)]})) == {}
    assert planner.last.reason == PLAIN_IS_BEST


def test_a_gain_within_the_margin_is_left() -> None:
    offers = {"a": [offer(0.1)]}
    assert plan(margin=0.05).choose([sample(0)], batched(offers))
    planner = plan(margin=0.2)
    assert planner.choose([sample(0)], batched(offers)) == {}
    assert planner.last.reason == WITHIN_MARGIN
    assert planner.last.offered == pytest.approx(1.1)
    assert planner.last.speedup == 1.0


def test_rows_go_to_the_samples_that_use_them() -> None:
    # Two rows are free, more are dear: both go to the sample whose draft holds.
    planner = plan(throughput=4e12)
    offers = {"a": [offer(0.3, 0.3, 0.3), offer(0.99, 0.99, 0.1)]}
    drafts = planner.choose([sample(0), sample(1)], batched(offers))
    assert as_lengths([sample(0), sample(1)], drafts) == [("", 0), ("a", 2)]


def test_equal_tokens_go_to_the_first_samples_and_drafters() -> None:
    planner = plan(throughput=4e12)
    same = [offer(0.5), offer(0.5), offer(0.5)]
    samples = [sample(i) for i in range(3)]
    assert as_lengths(samples, planner.choose(samples, batched({"b": same, "a": same}))) == [
        ("b", 1),
        ("", 0),
        ("", 0),
    ]


def test_a_long_sure_offer_goes_before_a_short_surer_one_while_rows_are_cheap() -> None:
    offers = {"short": [offer(0.95)], "long": [offer(0.8, 0.8, 0.8)]}
    assert plan().choose([sample(0)], batched(offers))["s0"].drafter == "long"
    dear = plan(per_row=7e-4).choose([sample(0)], batched(offers))
    assert dear["s0"].drafter == "short"


def test_measured_steps_change_the_plan_and_are_counted() -> None:
    registry = CollectorRegistry()
    planner = plan(metrics=PlannerMetrics(registry))
    offers = {"a": [offer(0.5, 0.5, 0.5)]}
    assert len(planner.choose([sample(0)], batched(offers))["s0"].tokens) == 3
    # Plain steps take what was predicted, verifying ones three times as long.
    for _ in range(100):
        planner.stepped(StepShape(1, 1, 10), 1e-3)
        planner.stepped(StepShape(1, 4, 10), 3e-3)
    value = registry.get_sample_value
    assert value("paceline_planner_steps_total", {"reason": DRAFTS}) == 1
    assert value("paceline_planner_tokens_total") == 3
    assert value("paceline_planner_expected_tokens_total") == pytest.approx(0.875)
    assert value("paceline_planner_predicted_speedup_ratio") == pytest.approx(1.875, rel=1e-3)
    assert value("paceline_planner_step_time_error_ratio_count") == 200
    assert value("paceline_planner_measured_step_seconds_total") == pytest.approx(0.4)
    assert value("paceline_planner_predicted_step_seconds_total") > 0.2


def test_a_step_that_is_not_planned_is_not_measured_by_an_earlier_plan() -> None:
    planner = plan()
    planner.choose([sample(0)], batched({"a": [offer(0.5)]}))
    assert planner.choose([], {}) == {}
    # A cached rollout of the same sample in the same place is verified, with more rows than any plan has.
    planner.stepped(StepShape(1, 129, 10), 1e-3)
    # Nor is the planner asked at all when every sample verifies one.
    planner.choose([sample(0)], batched({"a": [offer(0.5)]}))
    planner.stepped(StepShape(1, 129, 10), 1e-3)


def test_a_slower_machine_than_was_thought_makes_predictions_longer() -> None:
    planner = plan()
    for rows in (1, 2, 3) * 20:
        planner.stepped(StepShape(1, rows, 10), 3e-3)
    planner.choose([sample(0)], batched({"a": [offer(0.9)]}))
    assert planner.last.seconds == pytest.approx(3e-3, rel=0.05)


def test_a_decision_without_drafts_promises_plain_decoding() -> None:
    assert Decision(NO_OFFERS).speedup == 1.0
