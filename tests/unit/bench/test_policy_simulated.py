"""Decisions on devices of known step times: a part of what `python -m bench.policy.simulated` asks of all cells."""

from __future__ import annotations

import pytest

from bench.policy.simulated import Cell, SimulatedBatch, fixed_rates
from services.simulator.device_tables import devices, swept
from services.step_time.estimator import StepTimeEstimator

DEVICES = {device.name: device for device in devices()}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("samples", "context"), [(16, 1024), (64, 1024)])
@pytest.mark.parametrize("wrong", [0.02, 0.95])
@pytest.mark.parametrize("late", [0, 2])
def test_from_a_cold_start_the_planner_is_soon_near_the_best_fixed_length(
    name: str, samples: int, context: int, wrong: float, late: int
) -> None:
    cell = Cell(DEVICES[name], samples, context, wrong)
    found = SimulatedBatch(cell, "planner", swept(cell.device, 512), late).rates()
    fixed = [fixed_rates(cell, length) for length in (0, 1, 2, 4, 8, 12, 16)]
    # The steps after a change of the clock are few.
    assert found.later >= (0.92 if cell.device.slowed else 0.95) * max(each.later for each in fixed)
    assert found.first >= 0.85 * max(each.first for each in fixed)
    assert found.first >= 0.93 * fixed[0].first
    assert found.later >= 0.97 * fixed[0].later


@pytest.mark.parametrize("name", DEVICES)
def test_the_tables_rise(name: str) -> None:
    device = DEVICES[name]
    times = [device.seconds(8, rows, 8192) for rows in range(8, 4096, 8)]
    assert times == sorted(times)
    assert device.seconds(64, 64, 64 * 4096) > device.seconds(64, 64, 64 * 1024)


def test_steps_that_became_a_tenth_slower_do_not_hide_among_neighbours_that_were_measured_before() -> None:
    cell = Cell(DEVICES["8B H100, clock halved"], 16, 4096, 0.4)
    found = SimulatedBatch(cell, "planner", swept(cell.device, 512)).rates()
    assert found.later >= 0.96 * max(fixed_rates(cell, length).later for length in (2, 4, 8))


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_in_the_sweep_keeps_no_long_context_from_drafting(seed: int) -> None:
    cell = Cell(DEVICES["70B 8xH100"], 16, 65536, 0.02)
    found = SimulatedBatch(cell, "planner", swept(cell.device, 512, seed), seed=seed).rates()
    assert found.later >= 0.95 * fixed_rates(cell, 16).later


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_few_drafts_in_steps_that_were_short_by_chance_do_not_make_many_free(seed: int) -> None:
    device, n, context = DEVICES["70B 8xH100"], 256, 256 * 4096
    estimator = StepTimeEstimator(swept(device, 512, seed))
    for _ in range(16):
        estimator.observe(n, n, context, device.seconds(n, n, context))
    for noise in (1.0, 0.92):
        estimator.observe(n, n + 16, context, noise * device.seconds(n, n + 16, context))
    most = device.most_rows
    assert estimator.seconds(n, most, context) > 0.8 * device.seconds(n, most, context)
