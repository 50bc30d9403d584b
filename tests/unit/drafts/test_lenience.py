"""The controller of l: never the wrong way, never out of bounds, and home on every plant it is meant for."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.gateway.state.lenience import CEILING, DEFAULT_RULES, next_lenience

leniences = st.floats(1.0, CEILING)
kls = st.floats(0, 1e6)
targets = st.floats(1e-8, 1e3)


@given(leniences, kls, targets)
def test_l_never_moves_the_wrong_way(lenience: float, kl: float, target: float) -> None:
    moved = next_lenience(lenience, kl, target)
    if kl >= target:
        assert moved <= lenience
    if kl <= target:
        assert moved >= lenience


@given(leniences, kls, kls, targets)
def test_a_greater_kl_never_means_a_greater_l(
    lenience: float, one: float, other: float, target: float
) -> None:
    less, more = sorted((one, other))
    assert next_lenience(lenience, more, target) <= next_lenience(lenience, less, target)


@given(leniences, kls, targets)
def test_l_keeps_its_bounds_and_steps_are_small(lenience: float, kl: float, target: float) -> None:
    moved = next_lenience(lenience, kl, target)
    assert 1.0 <= moved <= CEILING
    assert abs(math.log(moved / lenience)) <= DEFAULT_RULES.largest_step + 1e-12


@given(st.floats(CEILING, 1e6), kls, targets)
def test_an_l_above_the_ceiling_is_never_raised(lenience: float, kl: float, target: float) -> None:
    assert next_lenience(lenience, kl, target) <= lenience


@pytest.mark.parametrize("kl", [None, math.nan, math.inf, -math.inf, -1e-3])
def test_a_report_that_says_nothing_moves_nothing(kl: float | None) -> None:
    assert next_lenience(1.7, kl, 0.01) == 1.7


def test_far_from_the_target_l_moves_and_near_it_it_rests() -> None:
    assert next_lenience(1.5, 0.0, 0.01) > 1.5
    assert next_lenience(1.5, 0.02, 0.01) < 1.5
    assert next_lenience(1.5, 0.0105, 0.01) == 1.5


@given(start=leniences, slope=st.floats(0.5, 8.0), wanted=st.floats(0.05, 1.8), base=st.floats(1e-6, 1.0))
def test_it_finds_the_l_that_gives_the_target(start: float, slope: float, wanted: float, base: float) -> None:
    """A plant whose log KL rises with log l by `slope`; the target is what log l = `wanted` gives."""

    def kl_of(lenience: float) -> float:
        return base * lenience**slope

    target, lenience = kl_of(math.exp(wanted)), start
    for _ in range(200):
        lenience = next_lenience(lenience, kl_of(lenience), target)
    assert abs(math.log(kl_of(lenience) / target)) <= DEFAULT_RULES.dead_band + 1e-9


@given(st.integers(0, 2**32), st.floats(1.0, 5.0))
def test_it_stays_near_the_target_under_noise_and_a_drifting_plant(seed: int, slope: float) -> None:
    import random

    noise, lenience, target, ratios = random.Random(seed), 1.0, 0.01, []
    for step in range(400):
        truth = 0.002 * lenience**slope * math.exp(0.3 * math.sin(step / 40))
        ratios.append(truth / target)
        lenience = next_lenience(lenience, truth * math.exp(noise.gauss(0, 0.15)), target)
    settled = ratios[150:]
    mean = math.exp(sum(map(math.log, settled)) / len(settled))
    # With a slope of 1 the target lies near the ceiling (0.002 * e^2 = 0.0148), and the drift takes it away.
    assert 0.7 < mean < 1.3


def test_a_target_out_of_reach_keeps_l_at_one_and_is_forgotten_at_once() -> None:
    lenience = 2.0
    for _ in range(100):
        lenience = next_lenience(lenience, 0.5, 0.01)
    assert lenience == 1.0
    assert next_lenience(lenience, 0.001, 0.01) == pytest.approx(math.exp(DEFAULT_RULES.largest_step))


@pytest.mark.parametrize("lenience", [0.9, 0.0, math.inf, math.nan])
def test_an_l_that_is_none_is_refused(lenience: float) -> None:
    with pytest.raises(ValueError, match="lenience"):
        next_lenience(lenience, 0.1, 0.1)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_target_that_is_none_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="target"):
        next_lenience(1.0, 0.1, target)
