"""What a move costs, and which way is cheaper."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.reallocator.planning.records import MoveBy, MoveCost, cheapest, lost, price
from services.reallocator.planning.throughput import ThroughputCurve
from tests.unit.reallocator.fleets import FIGURE_5, curves

KV = MoveCost(stall_steps=2.0, seconds_per_token=1e-6, donor=0.001, receiver=0.002)
PREFIX = MoveCost(stall_steps=1.0, donor=0.0005, receiver=0.0005, prefill=2.0)
COSTS = st.builds(MoveCost, st.floats(0, 50), st.floats(0, 1e-5), st.floats(0, 0.1), st.floats(0, 0.1))


def test_a_move_by_kv_costs_a_stall_and_a_little_of_both_sides() -> None:
    found = price(MoveBy.KV, KV, 1000, FIGURE_5, 10)
    assert found.stall == pytest.approx(2 * FIGURE_5.step_seconds(10) + 0.001)
    assert (found.donor, found.receiver, found.prefill) == (0.001, 0.002, 0.0)
    assert found.sample_seconds(20, 10) == pytest.approx(found.stall + 0.02 + 0.02)


def test_a_move_by_prefix_costs_the_receiver_the_prefill() -> None:
    curve = replace(FIGURE_5, prefill=1e-5)
    found = price(MoveBy.PREFIX, PREFIX, 1000, curve, 10)
    assert found.prefill == pytest.approx(0.02)
    assert found.receiver == pytest.approx(0.0205)
    assert found.stall == pytest.approx(FIGURE_5.step_seconds(10) + 0.02)
    assert lost([found, found]) == pytest.approx((0.001, 0.041))


def test_what_is_not_known_to_be_read_fast_goes_by_kv() -> None:
    assert FIGURE_5.prefill == inf
    assert cheapest({MoveBy.PREFIX: PREFIX, MoveBy.KV: KV}, 1, FIGURE_5, 1, 1).by is MoveBy.KV
    assert cheapest({MoveBy.PREFIX: PREFIX}, 1, FIGURE_5, 1, 1).by is MoveBy.PREFIX, "there is no other way"
    with pytest.raises(ValueError, match="empty"):
        cheapest({}, 1, FIGURE_5, 1, 1)


def test_an_8b_model_on_a_gpu_sends_long_contexts_and_reads_short_ones() -> None:
    # 40 us a token to read; 128 KiB a token at 10 GB/s to send, while it decodes on; a step of 25 ms.
    curve = ThroughputCurve((0.025,) * 64, prefill=4e-5)
    ways = {MoveBy.KV: MoveCost(seconds_per_token=1.3e-5), MoveBy.PREFIX: MoveCost(prefill=1.0)}
    assert cheapest(ways, 4000, curve, 32, 16).by is MoveBy.KV
    assert (
        cheapest(replace_way(ways, MoveBy.KV, donor=0.002, receiver=0.002), 50, curve, 32, 16).by
        is MoveBy.PREFIX
    )


def replace_way(ways: dict[MoveBy, MoveCost], by: MoveBy, **fields: float) -> dict[MoveBy, MoveCost]:
    return ways | {by: replace(ways[by], **fields)}


@settings(deadline=None, max_examples=100)
@given(
    curves(),
    COSTS,
    COSTS,
    st.floats(1e-5, 1e-2),
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_a_longer_context_costs_no_less_and_never_turns_from_kv_to_prefix(
    curve: ThroughputCurve,
    kv: MoveCost,
    prefix: MoveCost,
    prefill: float,
    tokens: int,
    more: int,
    here: int,
    there: int,
) -> None:
    curve = replace(curve, prefill=prefill)
    # A token is sent no slower than it is read.
    ways = {MoveBy.KV: kv, MoveBy.PREFIX: replace(prefix, seconds_per_token=0.0, prefill=1.0)}
    short, long = (cheapest(ways, each, curve, here, there) for each in (tokens, tokens + more))
    assert long.sample_seconds(here, there) >= short.sample_seconds(here, there) - 1e-12
    assert (short.by, long.by) != (MoveBy.KV, MoveBy.PREFIX)


@settings(deadline=None, max_examples=50)
@given(curves(), COSTS, COSTS, st.integers(1, 5000), st.integers(1, 64))
def test_no_way_costs_less_than_the_cheapest(
    curve: ThroughputCurve, kv: MoveCost, prefix: MoveCost, tokens: int, samples: int
) -> None:
    curve = replace(curve, prefill=1e-5)
    ways = {MoveBy.KV: kv, MoveBy.PREFIX: replace(prefix, prefill=1.0)}
    found = cheapest(ways, tokens, curve, samples, samples).sample_seconds(samples, samples)
    for by, cost in ways.items():
        assert found <= price(by, cost, tokens, curve, samples).sample_seconds(samples, samples)
