"""Formats of the quantized copy, what is counted of its drafts, and what is simulated with them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench.model_drafting import DraftedSamples, _count
from bench.quantized import replays
from bench.quantized.formats import ROUNDINGS, Rounding, int8, unpacked


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda each: each.name)
def test_a_rounded_weight_is_off_by_at_most_half_a_step(rounding: Rounding) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)) + 0.5
    weight[0, :128] = 0.0
    grouped = weight.view(8, -1, rounding.group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    width = 2 * grouped.abs().amax(-1) if rounding.symmetric else high - low
    step = (width / (2**rounding.bits - 1)).repeat_interleave(rounding.group, 1)
    found = rounding.rounded(weight)
    assert ((found - weight).abs() <= 0.501 * step + 1e-6).all()
    assert (found[0, :128] == 0).all()
    x = torch.randn(3, 256)
    assert torch.allclose(rounding.product(weight)(x), x @ found.T, atol=1e-4)


def test_products_of_this_machine_are_near_the_exact_one() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(32, 256, generator=generator), torch.randn(4, 256, generator=generator)
    # Without VNNI products of two neighbouring columns are added in 16 bits, which may saturate: one of two is 0.
    weight[:, 1::2] = 0.0
    exact = x @ weight.T
    for make, error in ((unpacked, 0.15), (int8, 0.03)):
        assert (make(weight)(x) - exact).norm() < error * exact.norm()


def test_tokens_behind_a_mismatch_or_the_end_are_not_compared() -> None:
    found = DraftedSamples(offered=[0] * 3, agreed=[0] * 3)
    _count(found, 3, 1, ended=False)
    _count(found, 3, 3, ended=False)
    _count(found, 3, 1, ended=True)
    assert (found.offered, found.agreed) == ([3, 2, 1], [3, 1, 1])
    assert (found.verifications, found.acceptance) == (3, 5 / 6)
    assert found.block_efficiency == pytest.approx(1 + 5 / 3)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples of a prompt in place of eight: the order of the ways does not depend on how many there are."""
    monkeypatch.setattr(replays, "rollout", partial(replays.rollout, samples=2))


@pytest.mark.usefixtures("few_samples")
def test_a_copy_that_agrees_more_takes_less_time_and_the_toggle_never_much_more_than_plain() -> None:
    found = {(row["copy"], row["mode"], row["cap"]): row for row in replays.toggling({4: [0.95], 8: [0.5]})}
    assert found["W4", "planner", 16]["of_plain"] < 0.9
    assert found["W8", "fixed", 8]["of_plain"] > 1.2
    assert found["W8", "toggle", 8]["of_plain"] < 1.01
    assert found["W4", "toggle", 8]["of_plain"] <= found["W4", "fixed", 8]["of_plain"]


@pytest.mark.usefixtures("few_samples")
def test_the_ladder_rises_while_drafts_are_accepted() -> None:
    rows = {row["way"]: row for row in replays.laddering([[0.99]] * 5)}
    caps = rows["ladder"]["caps"]
    assert caps[0] == 4
    assert caps == sorted(caps)
    assert caps[-1] > 4
    assert rows["fixed 8"]["caps"] == [8] * 5
