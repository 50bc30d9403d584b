"""The noise: known answers, range, precision, distribution, independence."""

import numpy as np
import pytest

from kernels.coupled_sampler.cpu import fill_words, from_order_key, gumbel_of_word, order_key, schedule_keys
from kernels.coupled_sampler.noise import (
    CELLS_PER_UNIT,
    G_MAX,
    G_MIN,
    LOWEST_GAP,
    UNREACHABLE,
    WORD_THRESHOLDS,
    Domain,
    Purpose,
    gumbel,
    gumbel_of_words,
    uniform,
    words,
)

SEED = 0x0123456789ABCDEF
EULER_GAMMA = 0.5772156649
EDGE_WORDS = np.array(
    [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xAAAAAAA9, 0xAAAAAAAA, 0xAAAAAB00, 0xFFFFFFFE, 0xFFFFFFFF],
    dtype=np.uint32,
)


def sample_of_words() -> np.ndarray:
    low = np.arange(5_000, dtype=np.uint32)
    return np.unique(np.concatenate([low, ~low, EDGE_WORDS, words(SEED, 1, 200_000)]))


def exact_gumbel(word: np.ndarray) -> np.ndarray:
    below, above = (word + 0.5) * 2.0**-32, (2.0**32 - 1 - word + 0.5) * 2.0**-32
    return -np.log(np.where(word < 2**31, -np.log(below), -np.log1p(-above)))


def test_words_equal_the_documented_known_answers():
    expected = [0x855A5DF1, 0x425715C3, 0x12D22138, 0x84949D54, 0xE0CFF381, 0x0DA312FC]
    assert words(SEED, 7, 6).tolist() == expected
    assert words(2**64 - 1, 2**32 - 1, 151936)[-2:].tolist() == [0xAFB2DEF2, 0xE9FB8249]


def test_residual_domain_has_words_of_its_own():
    expected = [0x3DC45F01, 0xEF89CC9C, 0x210B3EE7, 0x75CDEDDC]
    assert words(SEED, 7, 4, Domain.RESIDUAL).tolist() == expected


def test_gumbel_equals_the_documented_known_answers_bit_for_bit():
    expected = [0.42743823, -0.30038732, -0.9594321, 0.41856965, 2.0409012, -1.0758178]
    np.testing.assert_array_equal(gumbel(SEED, 7, 6), np.array(expected, dtype=np.float32))


def test_uniforms_equal_their_known_answers_and_differ_by_purpose():
    assert uniform(SEED, 7, Purpose.LENIENT) == 0.2649507342139259
    assert uniform(SEED, 7, Purpose.REJECTION) == 0.4980640228604898


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size():
    long = gumbel(SEED, 3, 1001)
    for size in (1, 2, 3, 4, 5, 1000):
        np.testing.assert_array_equal(gumbel(SEED, 3, size), long[:size])


@pytest.mark.parametrize("position", [-1, 1 << 32])
def test_position_outside_32_bits_is_refused(position):
    with pytest.raises(ValueError, match="position must be in"):
        gumbel(SEED, position, 4)
    with pytest.raises(ValueError, match="position must be in"):
        uniform(SEED, position, Purpose.LENIENT)


def test_range_is_the_documented_one():
    assert pytest.approx(-np.log(33 * np.log(2)), abs=1e-6) == G_MIN
    assert pytest.approx(33 * np.log(2), abs=1e-6) == G_MAX


def test_gumbel_is_within_2e_6_of_the_exact_function_and_never_falls():
    sample = sample_of_words()
    values = gumbel_of_words(sample)
    assert np.abs(values - exact_gumbel(sample.astype(np.float64))).max() < 2e-6
    assert (np.diff(values) >= 0).all()


def test_compiled_gumbel_equals_the_reference_bit_for_bit():
    sample = sample_of_words()[::17]
    sample = np.concatenate([sample, EDGE_WORDS])
    compiled = np.array([gumbel_of_word(np.uint32(w)) for w in sample], dtype=np.float32)
    np.testing.assert_array_equal(compiled.view(np.int32), gumbel_of_words(sample).view(np.int32))


@pytest.mark.parametrize("seed", [0, 1, SEED, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**32 - 1])
def test_compiled_words_equal_the_reference(seed, position):
    keys, pairs = np.empty(20, dtype=np.uint64), np.empty(2 * 13, dtype=np.uint64)
    schedule_keys(np.uint64(seed), keys)
    first, count = 100, 13
    fill_words(keys, np.uint64(position), np.uint64(Domain.TOKEN), np.uint64(first), np.uint64(count), pairs)
    expected = words(seed, position, 4 * (first + count))[4 * first :]
    np.testing.assert_array_equal(pairs.view(np.uint32), expected)


def test_order_keys_sort_as_the_numbers_do_and_can_be_undone():
    numbers = np.array([-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-45, 2.0, 3e38, np.inf], dtype=np.float32)
    keys = [order_key(x) for x in numbers]
    assert keys == sorted(set(keys))
    np.testing.assert_array_equal([from_order_key(np.int32(k)) for k in keys], numbers)


def test_word_thresholds_are_the_first_words_that_reach_their_gap():
    gaps = LOWEST_GAP + np.arange(len(WORD_THRESHOLDS)) / CELLS_PER_UNIT
    reachable = WORD_THRESHOLDS < UNREACHABLE
    first = WORD_THRESHOLDS[reachable]
    assert (gumbel_of_words(first.astype(np.uint32)) >= gaps[reachable]).all()
    inner = first > 0
    before = gumbel_of_words((first[inner] - np.uint64(1)).astype(np.uint32))
    assert (before < gaps[reachable][inner]).all()
    assert gaps[~reachable].min() > G_MAX
    assert inner.any()
    assert (~reachable).any()


def test_mean_and_variance_are_those_of_the_standard_gumbel_distribution():
    noise = gumbel(SEED, 0, 1_000_000).astype(np.float64)
    assert abs(noise.mean() - EULER_GAMMA) < 4 * 1.283e-3
    assert abs(noise.var() - np.pi**2 / 6) < 4 * 3.45e-3


def correlations(relation, streams=32, size=50_000) -> np.ndarray:
    """Correlation of two related noise arrays, in standard deviations, for independent streams."""
    scores = []
    for stream in range(streams):
        one, other = relation(SEED + 7919 * stream, 5 + stream, size)
        scores.append(np.corrcoef(one, other)[0, 1] * np.sqrt(len(one)))
    return np.array(scores)


def neighbour_tokens(distance):
    def relation(seed, position, size):
        noise = gumbel(seed, position, size)
        return noise[:-distance], noise[distance:]

    return relation


RELATIONS = {
    "seed + 1": lambda s, p, n: (gumbel(s, p, n), gumbel(s + 1, p, n)),
    "seed + 2**32": lambda s, p, n: (gumbel(s, p, n), gumbel(s + (1 << 32), p, n)),
    "position + 1": lambda s, p, n: (gumbel(s, p, n), gumbel(s, p + 1, n)),
    "seed + 1, position - 1": lambda s, p, n: (gumbel(s, p, n), gumbel(s + 1, p - 1, n)),
    "other domain": lambda s, p, n: (gumbel(s, p, n), gumbel(s, p, n, Domain.RESIDUAL)),
} | {f"token + {d}": neighbour_tokens(d) for d in (1, 2, 3, 4, 8)}


@pytest.mark.parametrize("relation", RELATIONS.values(), ids=RELATIONS.keys())
def test_noise_of_neighbours_is_uncorrelated(relation):
    """Over 32 streams the correlations have mean 0 (no common bias) and variance 1 (none of some)."""
    scores = correlations(relation)
    assert abs(scores.sum()) / np.sqrt(len(scores)) < 4
    assert (scores**2).sum() < 70.1  # chi-square, 32 degrees of freedom, p = 1e-4


def test_uniforms_of_neighbouring_positions_and_seeds_are_uniform_and_uncorrelated():
    by_position = np.array([uniform(SEED, p, Purpose.REJECTION) for p in range(4000)])
    by_seed = np.array([uniform(s, 1, Purpose.REJECTION) for s in range(4000)])
    for draws in (by_position, by_seed):
        counts = np.histogram(draws, bins=16, range=(0, 1))[0]
        assert ((counts - 250) ** 2 / 250).sum() < 44.3  # chi-square, 15 degrees of freedom, p = 1e-4
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 4 / np.sqrt(4000)
