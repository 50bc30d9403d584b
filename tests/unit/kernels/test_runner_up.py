"""The runner-up is what the reference would draw without the winner, and margins are differences of scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coupled_sampler.noise import gumbel
from kernels.coupled_sampler.proposals import gumbels
from kernels.coupled_sampler.sample import runner_up

VOCAB = 300
seeds = st.integers(0, 2**64 - 1)


@given(
    st.lists(st.tuples(seeds, st.integers(0, 2**32 - 1), st.integers(0, VOCAB - 1)), min_size=1, max_size=8)
)
def test_the_noise_of_single_tokens_is_the_specified_one(cells: list[tuple[int, int, int]]) -> None:
    found = gumbels(
        torch.from_numpy(np.array([seed for seed, _, _ in cells], np.uint64).view(np.int64)),
        torch.tensor([position for _, position, _ in cells]),
        torch.tensor([token for _, _, token in cells]),
    )
    expected = [gumbel(seed, position, VOCAB)[token] for seed, position, token in cells]
    assert found.numpy() == pytest.approx(expected, abs=1e-5)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.lists(st.booleans(), min_size=1, max_size=5))
def test_it_is_the_second_score_and_the_margin_is_the_difference(number: int, noisy: list[bool]) -> None:
    rng, n = np.random.default_rng(number), len(noisy)
    values = rng.normal(0, 2, (n, VOCAB)).astype(np.float32)
    values[:, rng.random(VOCAB) < 0.3] = -np.inf
    keys, positions = rng.integers(0, 2**63, n), rng.integers(0, 5000, n)
    noise = [
        gumbel(int(keys[i]), int(positions[i]), VOCAB) if noisy[i] else np.zeros(VOCAB, np.float32)
        for i in range(n)
    ]
    scores = values + np.array(noise)
    order = np.argsort(-scores, axis=1, kind="stable")
    tokens, margins = runner_up(
        torch.from_numpy(values.copy()),
        torch.from_numpy(order[:, 0].copy()),
        torch.from_numpy(keys),
        torch.from_numpy(positions),
        torch.tensor(noisy),
    )
    assert tokens.tolist() == order[:, 1].tolist()
    rows = np.arange(n)
    expected = scores[rows, order[:, 0]] - scores[rows, order[:, 1]]
    assert margins.numpy() == pytest.approx(expected, abs=1e-4)


def test_where_nothing_else_could_be_drawn_the_margin_is_infinite() -> None:
    values = torch.full((1, VOCAB), -torch.inf)
    values[0, 17] = 1.0
    one = torch.tensor([17])
    tokens, margins = runner_up(values, one, torch.tensor([5]), torch.tensor([3]), torch.tensor([True]))
    assert (tokens.tolist(), margins.tolist()) == ([17], [float("inf")])
