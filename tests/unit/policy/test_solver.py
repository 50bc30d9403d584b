"""The solver against all there is to try."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policy.solver import PLAIN, Configuration, Row, Table, measured_acceptance, solve
from services.policy.step_time import Architecture, StepTime

ARCHITECTURE = Architecture(weight_bytes=1e9, kv_bytes=1e4, dense_flops=1e9, attention_flops=1e3)


def model(**fields: float) -> StepTime:
    """Memory takes 1 ms, a row computes for 1 us."""
    return StepTime(architecture=ARCHITECTURE, **{"throughput": 1e15, "bandwidth": 1e12, **fields})


curves = st.lists(st.floats(0, 1), min_size=1, max_size=8)
machines = st.builds(
    lambda throughput, per_row, base: model(throughput=throughput, per_row=per_row, base=base),
    st.floats(1e11, 1e16),
    st.floats(0, 1e-3),
    st.floats(0, 1e-2),
)


def promised(
    target: StepTime, drafter: StepTime | None, curve: list[float], batch: int, c: Configuration
) -> float:
    """Speedup of a configuration, written out."""
    expected, survival = 0.0, 1.0
    for probability in curve[: c.depth]:
        survival *= 1 - (1 - probability) ** c.t
        expected += survival
    seconds = float(target.seconds(batch, batch * (1 + c.n), batch * 100))
    for i in range(c.s):
        assert drafter is not None
        seconds += float(drafter.seconds(batch, batch * c.t, batch * 100 + batch * i))
    return (1 + expected) * float(target.seconds(batch, batch, batch * 100)) / seconds


@settings(max_examples=60)
@given(machines, st.none() | machines, curves, st.sampled_from([(1,), (1, 2, 4)]))
def test_no_configuration_promises_more(
    target: StepTime, drafter: StepTime | None, curve: list[float], branchings: tuple[int, ...]
) -> None:
    table = solve(target, curve, 100.0, drafter=drafter, branchings=branchings, batches=(1, 8, 64))
    for row in table.rows:
        assert row.speedup == pytest.approx(promised(target, drafter, curve, row.batch, row.best))
        for t in branchings:
            for depth in range(1, len(curve) + 1):
                other = Configuration(depth if drafter else 0, t, t * depth)
                assert promised(target, drafter, curve, row.batch, other) <= row.speedup * (1 + 1e-9)
        assert row.speedup >= 1, "never worse than plain by its own account"


@given(machines, curves, st.floats(0, 1))
def test_below_the_margin_nothing_is_drafted(target: StepTime, curve: list[float], margin: float) -> None:
    for row in solve(target, curve, 100.0, margin=margin).rows:
        assert row.best == PLAIN or row.speedup >= 1 + margin


def test_a_compute_bound_batch_decodes_plainly_and_a_small_one_does_not() -> None:
    rows = {row.batch: row.best.n for row in solve(model(throughput=2e13), [0.7] * 8, 100.0).rows}
    assert rows[1] > 0
    assert rows[512] == 0
    lengths = [rows[batch] for batch in sorted(rows)]
    assert lengths == sorted(lengths, reverse=True)


def test_a_drafter_that_costs_as_much_as_the_target_never_pays() -> None:
    table = solve(model(), [1.0] * 8, 100.0, drafter=model())
    assert all(row.best == PLAIN for row in table.rows)
    cheap = solve(model(), [0.97] * 8, 100.0, drafter=model(bandwidth=4e12))
    assert cheap.look_up(1).best.s > 0


def test_lookups_take_the_next_larger_batch() -> None:
    table = Table((Row(4, Configuration(n=8), 2.0), Row(16, Configuration(n=2), 1.2)))
    assert [table.look_up(n).best.n for n in (1, 4, 5, 16, 17)] == [8, 8, 2, 2, 0]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1)), max_size=8), st.floats(0, 1))
def test_measured_acceptance_is_a_probability(counts: list[tuple[float, float]], prior: float) -> None:
    reached = [tried for tried, _ in counts]
    found = measured_acceptance(reached, [tried * share for tried, share in counts], prior)
    assert all(-1e-9 <= each <= 1 + 1e-9 for each in found)


def test_much_evidence_outweighs_the_prior() -> None:
    assert measured_acceptance([1e6, 0], [9e5, 0], 0.1) == pytest.approx([0.9, 0.9], abs=1e-3)
    assert np.isclose(measured_acceptance([0], [0], 0.3)[0], 0.3)
