"""Which choice of a drafter a token was."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.branches import Branches, _branches, _ranks
from kernels.coupled_sampler.noise import gumbel


@given(st.integers(0, 2**63), st.integers(1, 6), st.integers(3, 9))
def test_a_token_is_counted_by_its_place_among_logits_with_noise(seed: int, length: int, vocab: int) -> None:
    logits = np.random.default_rng(seed % 2**32).normal(size=(length, vocab)).astype(np.float32)
    order = np.stack([np.argsort(-(logits[i] + gumbel(seed, i, vocab))) for i in range(length)])
    for choice, expected in ((0, [length, 0, 0]), (1, [0, length, 0]), (vocab - 1, [0, 0, length])):
        assert _ranks(logits, order[:, choice], seed).tolist() == expected


def test_shares_are_of_all_tokens_and_of_the_mismatches() -> None:
    found = _branches(np.array([90, 6, 4]))
    assert (found.accepted, found.saved) == (0.9, 0.6)
    assert Branches(5, 5, 0).saved == 0.0
