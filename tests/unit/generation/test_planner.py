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

from services.contracts.knobs import Knobs
from services.contracts.modes import PlanReason
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.decision import PlanDecision
from services.generation.speculation.drafter import Proposal
from services.generation.speculation.modes import PlannerMode
from services.generation.speculation.plan import Drafts, StepShape
from services.generation.speculation.planner import KnobDrivenPlanner, PlannerMetrics
from tests.support.proposals import Draft, batched, by_sample
from tests.support.step_times import KnownStepTime, planner_mode, settled

WINDOW = 3
# Survival probabilities of which the search makes no difference.
ALIKE = 0.01
Proposals = Mapping[str, Sequence[Proposal | None]]


def sample(name: int, room: int = 100, context: int = 10) -> EngineSampleState:
    return EngineSampleState(f"s{name}", [1] * context, [], room, context)


def proposal(*acceptance: float, tokens: Sequence[int] = (), source: str = "") -> Proposal:
    return Proposal(list(tokens) or [7] * len(acceptance), list(acceptance), source)


def plan(window: int = WINDOW, margin: float = 0.0, **fields: Any) -> PlannerMode:
    return planner_mode(window, margin, KnownStepTime(**fields))


def knob_driven(
    metrics: PlannerMetrics | None = None, *, learns: bool = True, **fields: Any
) -> KnobDrivenPlanner:
    """Return an instance's planner in this mode, which also learns step times."""
    knobs = Knobs(mode="planner", draft_cap=WINDOW, margin=0.0)
    step_time = KnownStepTime(**fields).estimator()
    return KnobDrivenPlanner(
        knobs, step_time, lambda _: None, metrics=metrics, exploration=settled(), learns=learns
    )


def promised(
    time: KnownStepTime,
    samples: Sequence[EngineSampleState],
    proposals: Proposals,
    lengths: Sequence[tuple[str, int]],
) -> float:
    """Tokens a second of a plan: for each sample a drafter and a number of its tokens."""
    expected = sum(
        float(np.cumprod(made.acceptance)[:length].sum())
        for i, (name, length) in enumerate(lengths)
        if (made := proposals[name][i] if name else None) is not None
    )
    requests = len(samples)
    rows = requests + sum(length for _, length in lengths)
    context = sum(len(each.prompt) + len(each.response) for each in samples)
    return (requests + expected) / float(time.seconds(requests, rows, context))


def all_plans(
    samples: Sequence[EngineSampleState], proposals: Proposals
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Every choice of drafter and length."""
    choices = [
        [("", 0)]
        + [
            (name, length)
            for name, made in proposals.items()
            if (each := made[i]) is not None
            for length in range(1, min(len(each.tokens), max(one.room, 0), WINDOW) + 1)
        ]
        for i, one in enumerate(samples)
    ]
    return product(*choices)


def as_lengths(samples: Sequence[EngineSampleState], drafts: Drafts) -> list[tuple[str, int]]:
    found = [by_sample(drafts).get(each.sample_id) for each in samples]
    return [("", 0) if each is None else (each.drafter, len(each.tokens)) for each in found]


probability = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
proposal_lists = st.lists(probability, min_size=1, max_size=WINDOW).map(lambda each: proposal(*each))
maybe_proposals = st.one_of(st.none(), proposal_lists)
any_time = st.fixed_dictionaries(
    {
        "row": st.floats(1e-5, 1e-1),
        "base": st.floats(0, 1e-2),
        "per_request": st.floats(0, 1e-3),
        "per_row": st.floats(0, 1e-3),
        "per_attended_token": st.floats(0, 1e-4),
        "verify_per_request": st.floats(0, 1e-3),
    }
)


@st.composite
def batches(
    draw: st.DrawFn, drafters: int
) -> tuple[list[EngineSampleState], dict[str, list[Proposal | None]]]:
    size = draw(st.integers(1, 3))
    samples = [sample(i, draw(st.integers(-1, 4))) for i in range(size)]
    names = [f"d{i}" for i in range(drafters)]
    return samples, {name: draw(st.lists(maybe_proposals, min_size=size, max_size=size)) for name in names}


@settings(max_examples=200)
@given(batches(1), any_time)
def test_with_one_drafter_the_best_plan_of_all_is_found(
    batch: tuple[list[EngineSampleState], Proposals], fields: dict[str, float]
) -> None:
    samples, proposals = batch
    planner = plan(**fields)
    found = promised(
        planner.step_time,
        samples,
        proposals,
        as_lengths(samples, planner.choose(samples, batched(proposals))),
    )
    best = max(
        promised(planner.step_time, samples, proposals, each) for each in all_plans(samples, proposals)
    )
    assert found == pytest.approx(best, rel=ALIKE)


@settings(max_examples=200)
@given(batches(1), any_time, st.integers(0, 12))
def test_of_plans_within_the_engines_rows_the_best_is_found(
    batch: tuple[list[EngineSampleState], Proposals], fields: dict[str, float], capacity: int
) -> None:
    samples, proposals = batch
    planner = plan(**fields)
    drafts = planner.choose(samples, batched(proposals), capacity)
    assert drafts.count <= max(0, capacity - len(samples))
    found = promised(planner.step_time, samples, proposals, as_lengths(samples, drafts))
    fitting = [
        each
        for each in all_plans(samples, proposals)
        if sum(length for _, length in each) <= max(0, capacity - len(samples))
    ]
    assert found == pytest.approx(
        max(promised(planner.step_time, samples, proposals, each) for each in fitting), rel=ALIKE
    )


@settings(max_examples=200)
@given(batches(2), st.floats(1e-6, 1e-2), st.floats(0, 1e-2))
def test_where_time_grows_with_the_rows_the_best_choice_of_drafters_is_found(
    batch: tuple[list[EngineSampleState], Proposals], per_row: float, base: float
) -> None:
    samples, proposals = batch
    planner = plan(per_row=per_row, base=base)
    for _ in range(4):
        planner.choose(samples, batched(proposals))
    found = promised(
        planner.step_time,
        samples,
        proposals,
        as_lengths(samples, planner.choose(samples, batched(proposals))),
    )
    best = max(
        promised(planner.step_time, samples, proposals, each) for each in all_plans(samples, proposals)
    )
    assert found == pytest.approx(best, rel=ALIKE)


@settings(max_examples=300)
@given(batches(3), any_time, st.floats(0, 1))
def test_a_plan_keeps_the_rules_and_is_never_worse_than_plain_decoding(
    batch: tuple[list[EngineSampleState], Proposals], fields: dict[str, float], margin: float
) -> None:
    samples, proposals = batch
    planner = plan(margin=margin, **fields)
    for _ in range(4):
        drafts = planner.choose(samples, batched(proposals))
    for i, each in enumerate(samples):
        if each.sample_id not in drafts.tokens:
            continue
        name, tokens, source = by_sample(drafts)[each.sample_id]
        made = proposals[name][i]
        assert made is not None
        assert 0 < len(tokens) <= min(WINDOW, each.room)
        assert tokens == list(made.tokens[: len(tokens)])
        assert source == name
    plain = promised(planner.step_time, samples, proposals, [("", 0)] * len(samples))
    found = promised(planner.step_time, samples, proposals, as_lengths(samples, drafts))
    last = planner.last
    assert found >= plain * (1 - ALIKE)
    assert found / plain == pytest.approx(last.speedup, rel=1e-9)
    assert (last.reason == PlanReason.DRAFTS) == bool(drafts.tokens)
    assert last.tokens == drafts.count
    if drafts.tokens:
        assert last.speedup >= (1 + margin) * (1 - ALIKE)
    assert planner.choose(samples, batched(proposals)) == drafts


@given(batches(2), any_time)
def test_a_draft_that_cannot_be_kept_is_not_verified(
    batch: tuple[list[EngineSampleState], Proposals], fields: dict[str, float]
) -> None:
    samples, proposals = batch
    hopeless = {
        name: [None if each is None else proposal(*(0.0 for _ in each.tokens)) for each in made]
        for name, made in proposals.items()
    }
    planner = plan(**fields)
    assert planner.choose(samples, batched(hopeless)).tokens == {}
    assert planner.last.reason in (PlanReason.NO_PROPOSALS, PlanReason.PLAIN_IS_BEST)


def test_a_batch_without_proposals_decodes_plainly() -> None:
    planner = plan()
    assert planner.choose([sample(0)], batched({"a": [None]})).tokens == {}
    assert planner.last.reason == PlanReason.NO_PROPOSALS
    assert planner.choose([sample(0)], batched({})).tokens == {}


def test_one_sample_with_memory_to_spare_gets_the_whole_proposal() -> None:
    planner = plan()
    drafts = planner.choose(
        [sample(0)], batched({"a": [proposal(0.9, 0.9, 0.9, tokens=(3, 4, 5), source="history")]})
    )
    assert by_sample(drafts) == {"s0": Draft("a", [3, 4, 5], "history")}
    assert planner.last.speedup == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert planner.last.seconds == pytest.approx(1e-3, rel=1e-3)


def test_proposals_are_cut_to_the_window_and_to_what_the_sample_has_room_for() -> None:
    proposals = {"a": [proposal(0.9, 0.9, 0.9), proposal(0.9, 0.9, 0.9), proposal(0.9, 0.9, 0.9)]}
    samples = [sample(0), sample(1, room=1), sample(2, room=-1)]
    assert as_lengths(samples, plan(window=2).choose(samples, batched(proposals))) == [
        ("a", 2),
        ("a", 1),
        ("", 0),
    ]


@given(batches(2), any_time)
def test_drafts_say_how_much_sooner_their_tokens_come_than_plain_ones(
    batch: tuple[list[EngineSampleState], Proposals], fields: dict[str, float]
) -> None:
    samples, proposals = batch
    planner = plan(**fields)
    drafts = planner.choose(samples, batched(proposals))
    if drafts.tokens:
        requests, context = len(samples), 10 * len(samples)
        step, plain = planner.step_time.seconds(requests, [requests + drafts.count, requests], context)
        as_many = (requests + drafts.expected) / requests * plain
        assert drafts.saved == pytest.approx(as_many - step, rel=1e-6, abs=1e-12)


def test_when_rows_are_dear_nothing_is_drafted() -> None:
    planner = plan(per_row=1.0)
    assert planner.choose([sample(0)], batched({"a": [proposal(0.9)]})).tokens == {}
    assert planner.last.reason == PlanReason.PLAIN_IS_BEST


def test_a_gain_within_the_margin_is_left() -> None:
    proposals = {"a": [proposal(0.1)]}
    assert plan(margin=0.05).choose([sample(0)], batched(proposals)).tokens
    planner = plan(margin=0.2)
    assert planner.choose([sample(0)], batched(proposals)).tokens == {}
    assert planner.last.reason == PlanReason.WITHIN_MARGIN
    assert planner.last.available == pytest.approx(1.1)
    assert planner.last.speedup == 1.0


def test_rows_go_to_the_samples_that_use_them() -> None:
    # Two rows are free, more are dear: both go to the sample whose draft holds.
    planner = plan(row=2.5e-4)
    proposals = {"a": [proposal(0.3, 0.3, 0.3), proposal(0.99, 0.99, 0.1)]}
    drafts = planner.choose([sample(0), sample(1)], batched(proposals))
    assert as_lengths([sample(0), sample(1)], drafts) == [("", 0), ("a", 2)]


def test_equal_tokens_go_to_the_first_samples_and_drafters() -> None:
    planner = plan(row=2.5e-4)
    same = [proposal(0.5), proposal(0.5), proposal(0.5)]
    samples = [sample(i) for i in range(3)]
    assert as_lengths(samples, planner.choose(samples, batched({"b": same, "a": same}))) == [
        ("b", 1),
        ("", 0),
        ("", 0),
    ]


def test_a_long_sure_proposal_goes_before_a_short_surer_one_while_rows_are_cheap() -> None:
    proposals = {"short": [proposal(0.95)], "long": [proposal(0.8, 0.8, 0.8)]}
    assert plan().choose([sample(0)], batched(proposals)).origins["s0"][0] == "long"
    dear = plan(per_row=7e-4)
    # The price of a row is known from the step before.
    dear.choose([sample(0)], batched(proposals))
    assert dear.choose([sample(0)], batched(proposals)).origins["s0"][0] == "short"


def test_measured_steps_change_the_plan_and_are_counted() -> None:
    registry = CollectorRegistry()
    planner = knob_driven(PlannerMetrics(registry))
    proposals = {"a": [proposal(0.5, 0.5, 0.5)]}
    assert len(planner.choose([sample(0)], batched(proposals)).tokens["s0"]) == 3
    # Plain steps take what was predicted, verifying ones three times as long.
    for _ in range(100):
        planner.stepped(StepShape(1, 1, 10), 1e-3)
        planner.stepped(StepShape(1, 4, 10), 3e-3)
    value = registry.get_sample_value
    assert value("paceline_planner_steps_total", {"reason": PlanReason.DRAFTS}) == 1
    assert value("paceline_planner_tokens_total") == 3
    assert value("paceline_planner_expected_tokens_total") == pytest.approx(0.875)
    assert value("paceline_planner_predicted_speedup_ratio") == pytest.approx(1.875, rel=1e-3)
    assert value("paceline_planner_step_time_error_ratio_count") == 200
    assert value("paceline_planner_measured_step_seconds_total") == pytest.approx(0.4)
    assert value("paceline_planner_predicted_step_seconds_total") > 0.2


def test_a_step_that_is_not_planned_is_not_measured_by_an_earlier_plan() -> None:
    planner = knob_driven()
    planner.choose([sample(0)], batched({"a": [proposal(0.5)]}))
    # A cached rollout of the same sample in the same place is verified, with more rows than any plan has.
    planner.stepped(StepShape(1, 129, 10), 1e-3)
    # Nor is the planner asked at all when every sample verifies one.
    planner.choose([sample(0)], batched({"a": [proposal(0.5)]}))
    planner.stepped(StepShape(1, 129, 10), 1e-3)


def test_a_slower_machine_than_was_thought_makes_predictions_longer() -> None:
    planner = knob_driven()
    for rows in (1, 2, 3) * 20:
        planner.stepped(StepShape(1, rows, 10), 3e-3)
    planner = planner_mode(WINDOW, step_time=planner.step_time)
    planner.choose([sample(0)], batched({"a": [proposal(0.9)]}))
    assert planner.last.seconds == pytest.approx(3e-3, rel=0.05)


def test_a_planner_for_another_device_learns_nothing_of_this_one() -> None:
    registry = CollectorRegistry()
    planner = knob_driven(PlannerMetrics(registry), learns=False)
    before = planner.step_time.seconds(1, 3, 10)
    for _ in range(30):
        planner.stepped(StepShape(1, 3, 10), 1.0)
    assert planner.step_time.seconds(1, 3, 10) == before
    assert registry.get_sample_value("paceline_planner_step_time_error_ratio_count") == 0


def test_a_decision_without_drafts_promises_plain_decoding() -> None:
    assert PlanDecision(PlanReason.NO_PROPOSALS).speedup == 1.0
