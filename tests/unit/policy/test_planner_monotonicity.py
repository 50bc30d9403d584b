"""What the planner promises never falls when drafts get better, more are offered, or rows get cheaper."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generation.drafting.drafter import Offer, Offers
from services.generation.drafting.planner import Decision, PlannedDrafts
from services.generation.engine.types import SampleState
from services.policy.correction import CorrectedStepTime, Correction
from services.policy.step_time import Architecture, StepTime

ARCHITECTURE = Architecture(weight_bytes=1e9, kv_bytes=1e4, dense_flops=1e9, attention_flops=1e3)
WINDOW = 6
odds = st.floats(0.01, 1)
batches = st.lists(st.lists(odds, min_size=1, max_size=WINDOW), min_size=1, max_size=5)


def planned(acceptance: list[list[float]], per_row: float = 1e-4, throughput: float = 1e13) -> Decision:
    """The decision for one drafter's offers."""
    model = StepTime(architecture=ARCHITECTURE, throughput=throughput, bandwidth=1e12, per_row=per_row)
    plan = PlannedDrafts(WINDOW, CorrectedStepTime(model, Correction()))
    samples = [SampleState(f"s{n}", [1] * 10, [], 100) for n in range(len(acceptance))]
    plan.choose(samples, {"given": Offers.of([Offer([7] * len(each), each) for each in acceptance])})
    return plan.last


@given(batches, st.integers(0, 4), st.integers(0, WINDOW - 1), odds)
def test_a_better_token_never_makes_the_promise_smaller(
    acceptance: list[list[float]], sample: int, place: int, better: float
) -> None:
    improved = [list(each) for each in acceptance]
    row = improved[sample % len(improved)]
    row[place % len(row)] = max(row[place % len(row)], better)
    assert planned(improved).offered >= planned(acceptance).offered * (1 - 1e-9)


@given(batches, st.integers(0, 4), odds)
def test_one_more_token_on_offer_never_makes_the_promise_smaller(
    acceptance: list[list[float]], sample: int, more: float
) -> None:
    longer = [list(each) for each in acceptance]
    row = longer[sample % len(longer)]
    if len(row) < WINDOW:
        row.append(more)
    assert planned(longer).offered >= planned(acceptance).offered * (1 - 1e-9)


@given(batches, st.floats(0, 1e-2), st.floats(0, 1))
def test_cheaper_rows_never_make_it_plan_fewer_tokens_or_promise_less(
    acceptance: list[list[float]], per_row: float, share: float
) -> None:
    dear, cheap = planned(acceptance, per_row), planned(acceptance, per_row * share)
    assert cheap.offered >= dear.offered * (1 - 1e-9)
    assert cheap.tokens >= dear.tokens


@given(batches)
def test_what_it_promises_is_never_less_than_plain_decoding(acceptance: list[list[float]]) -> None:
    decision = planned(acceptance)
    assert decision.speedup >= 1
    assert decision.expected <= decision.tokens
