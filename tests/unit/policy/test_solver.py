"""The solver against all there is to try."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.knobs import Knobs
from services.contracts.modes import PlanReason
from services.generation.engine.types import EngineSampleState
from services.generation.experiments.modes import SolverMode, solve
from services.generation.speculation.drafter import Proposal, Proposals
from services.generation.speculation.plan import DraftableBatch
from services.step_time.estimator import StepTimeEstimator
from tests.support.step_times import KnownStepTime

curves = st.lists(st.floats(0, 1), min_size=1, max_size=8)
machines = st.builds(
    KnownStepTime, row=st.floats(1e-7, 1e-2), per_row=st.floats(0, 1e-3), base=st.floats(0, 1e-2)
)


def promised(
    target: KnownStepTime, drafter: KnownStepTime | None, curve: list[float], n: int, k: int
) -> float:
    """Speedup of k draft tokens for each of n samples, written out."""
    seconds = float(target.seconds(n, n * (1 + k), n * 100))
    if drafter is not None:
        seconds += k * float(drafter.seconds(n, n, n * 100))
    expected = float(np.cumprod(curve[:k]).sum())
    return (1 + expected) * float(target.seconds(n, n, n * 100)) / seconds


@settings(max_examples=60)
@given(machines, st.none() | machines, curves, st.sampled_from((1, 8, 64)))
def test_no_length_promises_more(target: Any, drafter: Any, curve: list[float], n: int) -> None:
    best, speedup = solve(n, 100.0, curve, target, drafter)
    assert speedup == pytest.approx(promised(target, drafter, curve, n, best))
    for k in range(1, len(curve) + 1):
        assert promised(target, drafter, curve, n, k) <= speedup * (1 + 1e-9)
    assert speedup >= 1, "never worse than plain by its own account"


def test_a_compute_bound_batch_decodes_plainly_and_a_small_one_does_not() -> None:
    target: Any = KnownStepTime(row=5e-5)
    lengths = [solve(1 << k, 100.0, [0.7] * 8, target)[0] for k in range(10)]
    assert lengths[0] > 0
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)


def test_a_drafter_that_costs_as_much_as_the_target_never_pays() -> None:
    target: Any = KnownStepTime()
    assert not any(solve(n, 100.0, [0.99] * 8, target, target)[0] for n in (1, 8, 64, 512))
    cheap: Any = KnownStepTime(weights=2.5e-4)
    assert solve(1, 100.0, [0.97] * 8, target, cheap)[0] > 0


def _mode(margin: float = 0.0, **fields: Any) -> SolverMode:
    known: Any = KnownStepTime(**fields)
    return SolverMode(known, Knobs(draft_cap=8, margin=margin))


def _samples(n: int) -> list[EngineSampleState]:
    return [EngineSampleState(f"s{i}", [1] * 10, [], 100, 10) for i in range(n)]


def _decide(mode: SolverMode, n: int) -> int:
    """Return the draft length that the mode takes of long proposals."""
    proposals = Proposals.of([Proposal([7] * 8, [0.9] * 8)] * n)
    drafts = mode.choose(_samples(n), {"reference": proposals})
    return max(map(len, drafts.tokens.values()), default=0)


@pytest.mark.parametrize("n", [1, 4, 64, 512])
def test_a_batch_takes_the_best_length_by_the_prior_where_it_gains_the_margin(n: int) -> None:
    best, speedup = solve(n, 10.0, [0.6] * 8, _mode(row=5e-5).step_time)
    assert _decide(_mode(row=5e-5), n) == best
    if best:
        assert _decide(_mode(margin=speedup - 1 - 1e-6, row=5e-5), n) == best
    mode = _mode(margin=speedup - 1 + 1e-6, row=5e-5)
    assert _decide(mode, n) == 0
    assert mode.last.reason == PlanReason.TABLE_PLAIN


def test_the_table_is_solved_again_after_256_steps() -> None:
    mode = _mode(per_row=2e-4)
    assert _decide(mode, 1) > 0
    for _ in range(200):
        mode.verified(8, 0)
    found = [_decide(mode, 1) for _ in range(256)]
    assert min(found[:255]) > 0
    assert found[255] == 0


def test_outcomes_shorten_the_drafts_of_the_next_table() -> None:
    mode = _mode(per_row=2e-4)
    before = _decide(mode, 1)
    for _ in range(200):
        mode.verified(8, 0)
    assert _decide(mode, 1) == before, "the table holds for the step"
    mode.new_step()
    assert _decide(mode, 1) == 0


def test_a_draft_model_that_was_never_timed_is_tried_on_a_machine_with_short_steps() -> None:
    """An estimator that has seen nothing predicts 10 ms, five of these steps: what is not tried is not timed."""
    target: Any = KnownStepTime(weights=2e-3)
    passes = StepTimeEstimator()
    assert passes.seconds(1, 1, 100) > 2 * float(target.seconds(1, 1, 100))
    assert solve(1, 100.0, [0.9] * 8, target, passes)[0] > 0
    passes.observe(1, 1, 100, 10e-3)
    assert solve(1, 100.0, [0.9] * 8, target, passes)[0] == 0


def test_a_draft_model_makes_the_passes_of_the_table_and_they_cost() -> None:
    nothing = np.zeros(2)
    batch = DraftableBatch(np.full(2, 8), nothing, nothing, 20)
    acceptance = np.full(8, 0.9)
    for weights, pays in ((1e-5, True), (1e-3, False)):
        mode, passes = _mode(), KnownStepTime(weights=weights)
        found = mode.passes(batch, acceptance, passes)  # type: ignore[arg-type]
        assert bool(found.tokens.max()) is pays
