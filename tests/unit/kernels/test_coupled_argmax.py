"""The fast CPU sampler takes the reference's token, always."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.coupled_sampler import INVALID, Domain, coupled_argmax_reference, cpu, gumbel
from kernels.coupled_sampler.cpu import CHUNK, coupled_argmax, warm_up

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

rng_seeds = st.integers(0, 2**32 - 1)
vocab_sizes = st.one_of(
    st.integers(1, 12),
    st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 512, 515]),
    st.integers(1, 5000),
)
temperatures = st.one_of(
    st.just(1.0), st.floats(1e-3, 100.0), st.sampled_from([0.0, 1e-3, 1e-30, 1e-45, 1e30])
)
kinds = st.sampled_from(["flat", "constant", "spread", "peaked", "masked", "few", "ties", "huge", "tiny"])


def make_logits(kind: str, rows: int, size: int, rng: np.random.Generator) -> np.ndarray:
    logits = rng.normal(0, 3, (rows, size))
    if kind == "flat":
        logits *= 0.1
    elif kind == "constant":
        logits[:] = 1.25
    elif kind == "peaked":
        logits[np.arange(rows), rng.integers(0, size, rows)] += rng.uniform(5, 40)
    elif kind in ("masked", "few"):
        keep = rng.random((rows, size)) < (0.3 if kind == "masked" else 2 / size)
        keep[np.arange(rows), rng.integers(0, size, rows)] = True
        logits[~keep] = -np.inf
    elif kind == "ties":
        logits = np.round(logits)
    elif kind == "huge":
        logits *= 10.0 ** rng.integers(3, 37)
    elif kind == "tiny":
        logits *= 1e-40
    return np.ascontiguousarray(logits.astype(np.float32))


def draw_keys(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 2**32, rows)


def full(rows: int, temperature: float) -> np.ndarray:
    return np.full(rows, temperature, dtype=np.float32)


def sample_one(row, temperature=1.0, position=0, seed=5):
    """The token of one row by both implementations, which must agree."""
    arguments = (
        np.array([row], dtype=np.float32),
        np.array([seed], dtype=np.uint64),
        np.array([position], dtype=np.int64),
        full(1, temperature),
    )
    with np.errstate(over="ignore"):
        reference = coupled_argmax_reference(*arguments)
    np.testing.assert_array_equal(coupled_argmax(*arguments), reference)
    return int(reference[0])


@PROPERTY
@given(seed=rng_seeds, kind=kinds, size=vocab_sizes, temperature=temperatures)
def test_tokens_equal_the_reference(seed, kind, size, temperature):
    rng = np.random.default_rng(seed)
    logits = make_logits(kind, 3, size, rng)
    keys = draw_keys(3, rng)
    expected = coupled_argmax_reference(logits, *keys, full(3, temperature))
    np.testing.assert_array_equal(coupled_argmax(logits, *keys, full(3, temperature)), expected)


@PROPERTY
@given(seed=rng_seeds, size=vocab_sizes, level=st.sampled_from([0.0, -50.0, 7.5, 3e4]), spoil=st.booleans())
def test_tokens_equal_the_reference_when_all_scores_nearly_tie(seed, size, level, spoil):
    """Each logit is set to level - g, so that all scores agree up to rounding, in every chunk."""
    rng = np.random.default_rng(seed)
    seeds, positions = draw_keys(2, rng)
    logits = np.stack(
        [np.float32(level) - gumbel(int(s), int(p), size) for s, p in zip(seeds, positions, strict=True)]
    )
    if spoil:
        logits[rng.random(logits.shape) < 0.5] -= np.float32(2e-3)
    expected = coupled_argmax_reference(logits, seeds, positions, full(2, 1.0))
    np.testing.assert_array_equal(coupled_argmax(logits, seeds, positions, full(2, 1.0)), expected)


@PROPERTY
@given(
    seed=rng_seeds,
    chunks=st.integers(2, 8),
    level=st.sampled_from([0.0, -8.0, 300.0, 3e4, -1e6, 1e7, 1e9]),
    ulps=st.integers(0, 2),
)
def test_tokens_equal_the_reference_when_the_best_of_all_chunks_nearly_tie(seed, chunks, level, ulps):
    """Constant logits within a chunk make its bound as tight as can be; its best nearly ties the others'."""
    rng = np.random.default_rng(seed)
    seeds, positions = draw_keys(1, rng)
    noise = gumbel(int(seeds[0]), int(positions[0]), chunks * CHUNK).reshape(chunks, CHUNK)
    levels = np.float32(level) - noise.max(axis=1)
    levels += rng.integers(-ulps, ulps + 1, chunks).astype(np.float32) * np.spacing(levels)
    logits = np.repeat(levels, CHUNK)[None, :]
    expected = coupled_argmax_reference(logits, seeds, positions, full(1, 1.0))
    np.testing.assert_array_equal(coupled_argmax(logits, seeds, positions, full(1, 1.0)), expected)


@pytest.mark.parametrize("size", [32_000, 151_936])
@pytest.mark.parametrize("kind", ["flat", "spread", "peaked", "few"])
def test_tokens_equal_the_reference_for_large_vocabularies(size, kind):
    rng = np.random.default_rng(size)
    logits = make_logits(kind, 3, size, rng)
    keys = draw_keys(3, rng)
    expected = coupled_argmax_reference(logits, *keys, full(3, 1.0))
    np.testing.assert_array_equal(coupled_argmax(logits, *keys, full(3, 1.0)), expected)


def test_rows_do_not_depend_on_their_batch():
    rng = np.random.default_rng(3)
    logits = make_logits("spread", 40, 700, rng)
    seeds, positions = draw_keys(40, rng)
    temperature = rng.choice(np.array([0, 0.5, 1, 2], dtype=np.float32), 40)
    together = coupled_argmax(logits, seeds, positions, temperature)
    order = rng.permutation(40)
    shuffled = coupled_argmax(logits[order], seeds[order], positions[order], temperature[order])
    np.testing.assert_array_equal(shuffled, together[order])
    alone = [coupled_argmax(logits[[i]], seeds[[i]], positions[[i]], temperature[[i]])[0] for i in range(40)]
    np.testing.assert_array_equal(alone, together)


def test_temperature_zero_is_greedy_with_ties_to_the_lowest_id():
    row = np.zeros(300)
    row[[140, 150, 299]] = 2.0
    assert sample_one(row, temperature=0.0) == 140
    assert sample_one(np.zeros(300), temperature=0.0) == 0
    assert sample_one([-0.0, 0.0], temperature=0.0) == 0
    row = np.full(300, -1.0)
    row[10], row[200] = -0.0, 0.0
    assert sample_one(row, temperature=0.0) == 10


def test_masked_entries_never_win():
    row = np.full(1000, -np.inf)
    row[777] = -1e30
    assert {sample_one(row, seed=s, temperature=t) for s in range(20) for t in (0.0, 0.7, 100.0)} == {777}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 130, 299])
def test_row_with_nan_or_infinity_is_invalid_and_harms_no_other(temperature, bad, place):
    logits = np.zeros((3, 300), dtype=np.float32)
    logits[1, place] = bad
    seeds, positions = np.arange(3, dtype=np.uint64), np.arange(3)
    tokens = coupled_argmax(logits, seeds, positions, full(3, temperature))
    np.testing.assert_array_equal(
        tokens, coupled_argmax_reference(logits, seeds, positions, full(3, temperature))
    )
    assert tokens[1] == INVALID
    assert min(tokens[0], tokens[2]) >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_any_finite_logit_is_invalid(temperature):
    assert sample_one(np.full(200, -np.inf), temperature) == INVALID


@pytest.mark.parametrize("temperature", [-1.0, np.nan, np.inf, -np.inf])
def test_row_with_a_temperature_that_is_negative_or_not_finite_is_invalid(temperature):
    assert sample_one([0.0, 1.0], temperature) == INVALID


@pytest.mark.parametrize("position", [-1, 1 << 32])
def test_row_with_a_position_out_of_range_is_invalid(position):
    assert sample_one([0.0, 1.0], position=position) == INVALID


def test_overflow_by_a_tiny_temperature_is_defined():
    assert sample_one([1e30, 2e38, 3e38], temperature=1e-30) == 0  # all scores +inf: lowest id
    assert sample_one([-2e38, -3e38], temperature=1e-30) == INVALID  # all scores -inf


def test_seed_position_and_domain_all_enter():
    logits = np.zeros((1, 4096), dtype=np.float32)

    def token(seed=1, position=1, domain=Domain.TOKEN):
        arguments = (logits, np.array([seed], dtype=np.uint64), np.array([position]), full(1, 1.0))
        found = coupled_argmax(*arguments, domain=domain)
        np.testing.assert_array_equal(found, coupled_argmax_reference(*arguments, domain=domain))
        return int(found[0])

    tokens = [
        token(),
        token(seed=2),
        token(seed=1 + (1 << 32)),
        token(position=2),
        token(domain=Domain.RESIDUAL),
    ]
    assert len(set(tokens)) == 5


def test_result_is_written_to_out():
    out = np.empty(2, dtype=np.int64)
    logits = np.array([[0, 50], [50, 0]], dtype=np.float32)
    assert coupled_argmax(logits, [1, 2], [0, 0], [1.0, 1.0], out) is out
    assert out.tolist() == [1, 0]


def test_signed_seeds_are_read_as_twos_complement():
    logits = np.zeros((1, 500), dtype=np.float32)
    signed = coupled_argmax(logits, np.array([-5], dtype=np.int64), [3], [1.0])
    unsigned = coupled_argmax(logits, np.array([2**64 - 5], dtype=np.uint64), [3], [1.0])
    assert signed == unsigned


def test_torch_tensors_and_strided_logits_give_the_same_tokens():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    padded = make_logits("spread", 4, 520, rng)
    seeds, positions = draw_keys(4, rng)
    expected = coupled_argmax_reference(padded[:, :500], seeds, positions, full(4, 1.0))
    np.testing.assert_array_equal(coupled_argmax(padded[:, :500], seeds, positions, full(4, 1.0)), expected)
    tensors = (
        torch.from_numpy(padded)[:, :500],
        torch.from_numpy(seeds.view(np.int64)),
        torch.from_numpy(positions),
        torch.ones(4),
    )
    np.testing.assert_array_equal(coupled_argmax(*tensors), expected)


def test_empty_batch_gives_no_tokens():
    assert coupled_argmax(np.empty((0, 8), dtype=np.float32), [], [], []).tolist() == []


def test_warm_up_compiles_the_one_specialisation_that_all_calls_use():
    warm_up()
    warm_up()
    logits = np.zeros((1, 4), dtype=np.float32)
    coupled_argmax(logits, [1], [0], [1.0])
    logits.flags.writeable = False
    coupled_argmax(logits, [1], [0], [1.0])
    assert cpu._verify_rows.signatures == [cpu._VERIFY_SIGNATURE.args]


def test_logits_of_another_type_are_refused():
    with pytest.raises(TypeError, match="float32, got float64"):
        coupled_argmax(np.zeros((1, 4)), [1], [0], [1.0])


@pytest.mark.parametrize("shape", [(4,), (1, 0)])
def test_logits_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="logits must be"):
        coupled_argmax(np.zeros(shape, dtype=np.float32), [1], [0], [1.0])


def test_vectors_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="1 requests, but 1 seeds, 2 positions"):
        coupled_argmax(np.zeros((1, 4), dtype=np.float32), [1], [0, 1], [1.0])


def test_out_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="out must be"):
        coupled_argmax(np.zeros((1, 4), dtype=np.float32), [1], [0], [1.0], np.empty(2, dtype=np.int64))
