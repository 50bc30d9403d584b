"""Coupled samples follow softmax(logits / T), over neighbouring seeds and positions alike."""

import numpy as np
import pytest

from kernels.coupled_sampler.cpu import coupled_argmax

DRAWS = 100_000
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5, -3.0, 0.1], dtype=np.float32)
CHI_SQUARE_9 = 33.7
"""Upper quantile of chi-square with 9 degrees of freedom at p = 1e-4."""


def draw(seeds, positions, temperature=1.0, logits=LOGITS):
    rows = np.broadcast_to(logits, (DRAWS, len(logits)))
    return coupled_argmax(rows, seeds, positions, np.full(DRAWS, temperature, dtype=np.float32))


def softmax(logits, temperature):
    weights = np.exp((logits - logits.max()) / temperature, dtype=np.float64)
    return weights / weights.sum()


def chi_square(tokens, probabilities):
    expected = DRAWS * probabilities
    observed = np.bincount(tokens, minlength=len(probabilities))
    return ((observed - expected) ** 2 / expected).sum()


CONSECUTIVE = np.arange(DRAWS)
CONSTANT = np.full(DRAWS, 12345)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (CONSECUTIVE, CONSTANT),
        (CONSTANT, CONSECUTIVE),
        (CONSECUTIVE << 32, CONSTANT),
        (CONSECUTIVE, CONSECUTIVE),
    ],
    ids=["neighbouring seeds", "neighbouring positions", "seeds that differ in the high word", "both"],
)
def test_frequencies_are_those_of_the_softmax(seeds, positions, temperature):
    tokens = draw(seeds.astype(np.uint64), positions, temperature)
    assert chi_square(tokens, softmax(LOGITS, temperature)) < CHI_SQUARE_9


@pytest.mark.parametrize("which", ["seeds", "positions"])
def test_consecutive_tokens_are_independent(which):
    """The pairs of tokens of neighbours fill the product distribution: chi-square over 4 x 4 cells."""
    logits = np.array([0.5, 0.0, -0.5, 0.25], dtype=np.float32)
    seeds, positions = (CONSECUTIVE, CONSTANT) if which == "seeds" else (CONSTANT, CONSECUTIVE)
    tokens = draw(seeds.astype(np.uint64), positions, logits=logits)
    pairs = np.bincount(4 * tokens[:-1] + tokens[1:], minlength=16)
    expected = (DRAWS - 1) * np.outer(softmax(logits, 1.0), softmax(logits, 1.0)).ravel()
    assert ((pairs - expected) ** 2 / expected).sum() < 44.3  # 15 degrees of freedom, p = 1e-4


def test_a_large_flat_vocabulary_is_sampled_uniformly():
    """Tokens of all chunks and of all places within a chunk win equally often."""
    size, rows = 1000, 20_000
    tokens = coupled_argmax(
        np.zeros((rows, size), dtype=np.float32),
        np.arange(rows, dtype=np.uint64),
        np.zeros(rows, dtype=np.int64),
        np.ones(rows, dtype=np.float32),
    )
    for counts in (np.bincount(tokens // 100, minlength=10), np.bincount(tokens % 10, minlength=10)):
        assert ((counts - rows / 10) ** 2 / (rows / 10)).sum() < CHI_SQUARE_9


def test_a_nearby_distribution_with_the_same_noise_mostly_picks_the_same_token():
    """At least (1 - TV) / (1 + TV) of the draws agree: why coupled drafts are accepted."""
    rng = np.random.default_rng(0)
    nearby = (LOGITS + rng.normal(0, 0.1, len(LOGITS))).astype(np.float32)
    distance = 0.5 * np.abs(softmax(LOGITS, 1.0) - softmax(nearby, 1.0)).sum()
    seeds, positions = CONSECUTIVE.astype(np.uint64), CONSTANT
    agreement = (draw(seeds, positions) == draw(seeds, positions, logits=nearby)).mean()
    assert agreement > (1 - distance) / (1 + distance) - 4 * np.sqrt(0.25 / DRAWS)
