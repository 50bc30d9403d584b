"""The simulated cluster: it does all the work, moves by the same plan, and is done no later for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.__main__ import figure_5
from bench.simulator.cluster import ReallocationSetup, SimulatedCluster
from bench.simulator.loads import PUBLISHED, dealt, lmsys_lengths, published_curve
from services.reallocator.planning.price import MoveBy, MoveCost
from services.reallocator.planning.records import ReallocationRules

CURVE = published_curve()


def test_the_curve_goes_through_the_published_points() -> None:
    for samples, tokens in PUBLISHED.items():
        assert CURVE.throughput(samples) == pytest.approx(tokens)


def test_figure_5_is_reproduced() -> None:
    found = figure_5(19)
    assert found["moved"] == 5
    assert found["tokens_per_second_before"] == pytest.approx(1556)
    assert found["tokens_per_second_after"] == pytest.approx(2180)
    own = figure_5(None)
    assert own["gain"] >= found["gain"], "the saturation point is no worse a threshold"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(1, 300), max_size=20), min_size=1, max_size=4), st.integers(1, 40))
def test_all_work_is_done_whatever_moves(lengths: list[list[int]], decision_steps: int) -> None:
    loads = {f"i{n}": each for n, each in enumerate(lengths)}
    total = sum(map(sum, lengths))
    manner = ReallocationSetup(
        ReallocationRules(least_gain=0.0, least_balance_gain=0.0, payback=0.0), decision_steps
    )
    outcome = SimulatedCluster(loads, CURVE, manner).run()
    assert outcome.tokens == total
    assert outcome.moved <= 10 * sum(map(len, lengths)), "samples are not sent to and fro"


def test_an_uneven_load_is_done_sooner_with_moves() -> None:
    loads = {"a": [1500] * 24, "b": [1500]}
    plain = SimulatedCluster(loads, CURVE, generated=200).run()
    moved = SimulatedCluster(loads, CURVE, ReallocationSetup(), generated=200).run()
    assert moved.moved >= 5
    assert moved.seconds < 0.8 * plain.seconds


def test_moves_do_no_harm_to_a_load_that_is_dealt_evenly() -> None:
    for seed in range(4):
        loads = dealt(lmsys_lengths(64, seed), 2)
        plain, moved = (
            SimulatedCluster(loads, CURVE).run(),
            SimulatedCluster(loads, CURVE, ReallocationSetup()).run(),
        )
        assert moved.seconds <= 1.02 * plain.seconds


def test_what_a_move_costs_is_paid() -> None:
    loads = {"a": [1500] * 24, "b": [1500]}
    cheap, dear = (
        SimulatedCluster(
            loads,
            CURVE,
            ReallocationSetup(ReallocationRules(payback=0.0, ways={MoveBy.KV: MoveCost(steps)})),
            generated=200,
        ).run()
        for steps in (1.0, 100.0)
    )
    assert dear.moved
    assert cheap.seconds < dear.seconds


def test_where_prefill_is_cheap_samples_go_by_prefix_and_are_done_sooner() -> None:
    loads = {"a": [1500] * 24, "b": [1500]}
    curve = replace(CURVE, prefill=1e-6)
    ways = {MoveBy.KV: MoveCost(20.0), MoveBy.PREFIX: MoveCost(1.0, prefill=1.0)}
    kv = SimulatedCluster(
        loads, curve, ReallocationSetup(ReallocationRules(ways={MoveBy.KV: ways[MoveBy.KV]})), generated=200
    ).run()
    free = SimulatedCluster(
        loads, curve, ReallocationSetup(ReallocationRules(ways=ways)), generated=200
    ).run()
    assert (kv.by_prefix, free.by_prefix) == (0, free.moved)
    assert free.seconds <= kv.seconds
