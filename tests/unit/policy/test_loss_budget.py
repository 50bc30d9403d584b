"""The loss budget: what is lost over many steps is bounded, whatever is predicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generation.speculation.loss_budget import LossBudget


@given(st.lists(st.floats(0, 20), min_size=64, max_size=256))
def test_steps_that_bring_nothing_lose_a_small_share_at_most(wanted: list[float]) -> None:
    budget, lost = LossBudget(), 0.0
    for cost in wanted:
        cost = min(1.0 + cost, budget.seconds(1.0))
        lost += cost - 1.0
        budget.settle(cost, 1, expected=4.0)
    assert lost <= 0.8 + 0.02 * len(wanted)


def test_good_drafts_earn_longer_steps_and_bad_ones_lose_trust() -> None:
    budget = LossBudget()
    assert budget.token_seconds(1.0, 1) == 0
    for _ in range(10):
        budget.settle(2.0, 8, expected=24.0, accepted=24.0)
    assert budget.seconds(1.0) > 5
    trusted = budget.token_seconds(1.0, 1)
    assert trusted > 0.5
    for _ in range(10):
        budget.settle(3.0, 8, expected=24.0)
    assert budget.seconds(1.0) == 1.0
    assert budget.token_seconds(1.0, 1) < 0.1 * trusted
