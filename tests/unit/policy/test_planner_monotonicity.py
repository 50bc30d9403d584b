"""What the planner promises never falls when drafts get better, more are offered, or rows get cheaper."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.decision import PlanDecision
from services.generation.speculation.drafter import Proposal, Proposals
from tests.support.step_times import KnownStepTime, planner_mode

WINDOW = 6
odds = st.floats(0.01, 1)
batches = st.lists(st.lists(odds, min_size=1, max_size=WINDOW), min_size=1, max_size=5)


def planned(acceptance: list[list[float]], per_row: float = 1e-4) -> PlanDecision:
    """Return the decision for one drafter's proposals."""
    plan = planner_mode(WINDOW, step_time=KnownStepTime(row=1e-4, per_row=per_row))
    samples = [EngineSampleState(f"s{n}", [1] * 10, [], 100, 10) for n in range(len(acceptance))]
    plan.choose(
        samples, {"reference": Proposals.of([Proposal([7] * len(each), each) for each in acceptance])}
    )
    return plan.last


@given(batches, st.integers(0, 4), st.integers(0, WINDOW - 1), odds)
def test_a_better_token_never_makes_the_promise_smaller(
    acceptance: list[list[float]], sample: int, place: int, better: float
) -> None:
    improved = [list(each) for each in acceptance]
    row = improved[sample % len(improved)]
    row[place % len(row)] = max(row[place % len(row)], better)
    assert planned(improved).available >= planned(acceptance).available * (1 - 1e-9)


@given(batches, st.integers(0, 4), odds)
def test_one_more_token_on_proposal_never_makes_the_promise_smaller(
    acceptance: list[list[float]], sample: int, more: float
) -> None:
    longer = [list(each) for each in acceptance]
    row = longer[sample % len(longer)]
    if len(row) < WINDOW:
        row.append(more)
    assert planned(longer).available >= planned(acceptance).available * (1 - 1e-9)


@given(batches, st.floats(0, 1e-2), st.floats(0, 1))
def test_cheaper_rows_never_make_it_plan_fewer_tokens_or_promise_less(
    acceptance: list[list[float]], per_row: float, share: float
) -> None:
    dear, cheap = planned(acceptance, per_row), planned(acceptance, per_row * share)
    assert cheap.available >= dear.available * (1 - 1e-9)
    assert cheap.tokens >= dear.tokens


@given(batches)
def test_what_it_promises_is_never_less_than_plain_decoding(acceptance: list[list[float]]) -> None:
    decision = planned(acceptance)
    assert decision.speedup >= 1
    assert decision.expected <= decision.tokens
