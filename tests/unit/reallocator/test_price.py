"""What a move costs, and which way is cheaper."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.reallocator.price import By, WayCost, cheapest, lost, price
from services.reallocator.threshold import Curve
from tests.unit.reallocator.fleets import FIGURE_5, curves

KV = WayCost(stall_steps=2.0, seconds_per_token=1e-6, donor=0.001, receiver=0.002)
PREFIX = WayCost(stall_steps=1.0, donor=0.0005, receiver=0.0005, reading=2.0)
COSTS = st.builds(
    WayCost,
    st.floats(0, 50),
    st.floats(0, 1e-5),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
)


def test_a_move_by_kv_costs_a_stall_and_a_little_of_both_sides() -> None:
    found = price(By.KV, KV, 1000, FIGURE_5, 10)
    assert found.stall == pytest.approx(2 * FIGURE_5.step_seconds(10) + 0.001)
    assert (found.donor, found.receiver, found.reading) == (0.001, 0.002, 0.0)
    assert found.sample_seconds(20, 10) == pytest.approx(found.stall + 0.02 + 0.02)


def test_a_move_by_prefix_costs_the_receiver_the_reading() -> None:
    curve = replace(FIGURE_5, reading=1e-5)
    found = price(By.PREFIX, PREFIX, 1000, curve, 10)
    assert found.reading == pytest.approx(0.02)
    assert found.receiver == pytest.approx(0.0205)
    assert found.stall == pytest.approx(FIGURE_5.step_seconds(10) + 0.02)
    assert lost([found, found]) == pytest.approx((0.001, 0.041))


def test_what_is_not_known_to_be_read_fast_goes_by_kv() -> None:
    assert FIGURE_5.reading == inf
    assert cheapest({By.PREFIX: PREFIX, By.KV: KV}, 1, FIGURE_5, 1, 1).by is By.KV
    assert cheapest({By.PREFIX: PREFIX}, 1, FIGURE_5, 1, 1).by is By.PREFIX, "there is no other way"
    with pytest.raises(ValueError, match="empty"):
        cheapest({}, 1, FIGURE_5, 1, 1)


def test_an_8b_model_on_a_gpu_sends_long_contexts_and_reads_short_ones() -> None:
    # 40 us a token to read; 128 KiB a token at 10 GB/s to send, while it decodes on; a step of 25 ms.
    curve = Curve((0.025,) * 64, reading=4e-5)
    ways = {By.KV: WayCost(seconds_per_token=1.3e-5), By.PREFIX: WayCost(reading=1.0)}
    assert cheapest(ways, 4000, curve, 32, 16).by is By.KV
    assert cheapest(replace_way(ways, By.KV, donor=0.002, receiver=0.002), 50, curve, 32, 16).by is By.PREFIX


def replace_way(ways: dict[By, WayCost], by: By, **fields: float) -> dict[By, WayCost]:
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
    curve: Curve, kv: WayCost, prefix: WayCost, reading: float, tokens: int, more: int, here: int, there: int
) -> None:
    curve = replace(curve, reading=reading)
    # A token is sent no slower than it is read.
    ways = {By.KV: kv, By.PREFIX: replace(prefix, seconds_per_token=0.0, reading=1.0)}
    short, long = (cheapest(ways, each, curve, here, there) for each in (tokens, tokens + more))
    assert long.sample_seconds(here, there) >= short.sample_seconds(here, there) - 1e-12
    assert (short.by, long.by) != (By.KV, By.PREFIX)


@settings(deadline=None, max_examples=50)
@given(curves(), COSTS, COSTS, st.integers(1, 5000), st.integers(1, 64))
def test_no_way_costs_less_than_the_cheapest(
    curve: Curve, kv: WayCost, prefix: WayCost, tokens: int, samples: int
) -> None:
    curve = replace(curve, reading=1e-5)
    ways = {By.KV: kv, By.PREFIX: replace(prefix, reading=1.0)}
    found = cheapest(ways, tokens, curve, samples, samples).sample_seconds(samples, samples)
    for by, cost in ways.items():
        assert found <= price(by, cost, tokens, curve, samples).sample_seconds(samples, samples)
