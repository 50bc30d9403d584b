"""The solver against all there is to try."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.engine.types import EngineSampleState
from services.generation.speculation.draft_lengths import DraftableBatch
from services.generation.speculation.drafter import Proposal, Proposals
from services.generation.speculation.exploration import Exploration
from services.generation.speculation.modes.decision import PlanReason
from services.generation.speculation.modes.solver import BATCHES, Row, SolverMode, solve
from services.generation.speculation.plan import FixedLengthPlanner
from tests.support.step_times import KnownStepTime

curves = st.lists(st.floats(0, 1), min_size=1, max_size=8)
machines = st.builds(
    KnownStepTime, row=st.floats(1e-7, 1e-2), per_row=st.floats(0, 1e-3), base=st.floats(0, 1e-2)
)


def promised(target: KnownStepTime, drafter: KnownStepTime | None, curve: list[float], row: Row) -> float:
    """Speedup of a configuration, written out."""
    seconds = float(target.seconds(row.batch, row.batch * (1 + row.n), row.batch * 100))
    if drafter is not None:
        seconds += row.n * float(drafter.seconds(row.batch, row.batch, row.batch * 100))
    expected = float(np.cumprod(curve[: row.n]).sum())
    return (1 + expected) * float(target.seconds(row.batch, row.batch, row.batch * 100)) / seconds


@settings(max_examples=60)
@given(machines, st.none() | machines, curves)
def test_no_configuration_promises_more(target: Any, drafter: Any, curve: list[float]) -> None:
    for row in solve(target, curve, 100.0, drafter=drafter, batches=(1, 8, 64)):
        assert row.speedup == pytest.approx(promised(target, drafter, curve, row))
        for n in range(1, len(curve) + 1):
            assert promised(target, drafter, curve, Row(row.batch, n)) <= row.speedup * (1 + 1e-9)
        assert row.speedup >= 1, "never worse than plain by its own account"


@given(machines, curves, st.floats(0, 1))
def test_below_the_margin_nothing_is_drafted(target: Any, curve: list[float], margin: float) -> None:
    for row in solve(target, curve, 100.0, margin=margin):
        assert row.n == 0 or row.speedup >= 1 + margin


def test_a_compute_bound_batch_decodes_plainly_and_a_small_one_does_not() -> None:
    rows = {row.batch: row.n for row in solve(KnownStepTime(row=5e-5), [0.7] * 8, 100.0)}  # type: ignore[arg-type]
    assert rows[1] > 0
    assert rows[512] == 0
    lengths = [rows[batch] for batch in sorted(rows)]
    assert lengths == sorted(lengths, reverse=True)


def test_a_drafter_that_costs_as_much_as_the_target_never_pays() -> None:
    target: Any = KnownStepTime()
    assert not any(row.n for row in solve(target, [0.99] * 8, 100.0, drafter=target))
    cheap: Any = KnownStepTime(weights=2.5e-4)
    assert solve(target, [0.97] * 8, 100.0, drafter=cheap)[0].n > 0


def _mode(**fields: Any) -> SolverMode:
    known: Any = KnownStepTime(**fields)
    return SolverMode(known, 0.0, Exploration(), FixedLengthPlanner(8))


def _samples(n: int) -> list[EngineSampleState]:
    return [EngineSampleState(f"s{i}", [1] * 10, [], 100, 10) for i in range(n)]


def _decide(mode: SolverMode, n: int) -> int:
    """Return the draft length that the mode takes of long proposals."""
    proposals = Proposals.of([Proposal([7] * 8, [0.9] * 8)] * n)
    drafts = mode.choose(_samples(n), {"reference": proposals})
    return max(map(len, drafts.tokens.values()), default=0)


def test_batches_take_the_length_of_the_next_larger_row_and_beyond_the_table_none() -> None:
    mode = _mode(row=5e-5)
    assert _decide(mode, 1) > 0
    assert mode.table
    mode.table = [Row(4, 8, 2.0), Row(16, 2, 1.2)]
    assert [_decide(mode, n) for n in (1, 4, 5, 16, 17)] == [8, 8, 2, 2, 0]
    assert mode.last.reason == PlanReason.TABLE_PLAIN


def test_outcomes_shorten_the_drafts_of_the_next_table() -> None:
    mode = _mode(per_row=2e-4)
    before = _decide(mode, 1)
    for _ in range(200):
        mode.verified(8, 0)
    assert _decide(mode, 1) == before, "the table holds for the step"
    mode.new_step()
    assert _decide(mode, 1) == 0


def test_a_draft_model_makes_the_passes_of_the_table_and_they_cost() -> None:
    nothing = np.zeros(2)
    batch = DraftableBatch(np.full(2, 8), nothing, nothing, 20)
    acceptance = np.full(8, 0.9)
    for weights, pays in ((1e-5, True), (1e-3, False)):
        mode, passes = _mode(), KnownStepTime(weights=weights)
        found = mode.passes(batch, acceptance, passes)  # type: ignore[arg-type]
        assert bool(found.tokens.max()) is pays
    assert max(BATCHES) == 512
