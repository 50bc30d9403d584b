"""Top-k and top-p as a threshold keep what sorting would keep."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coupled_sampler import INVALID, UNSAMPLED
from kernels.coupled_sampler.reference import MASS_BITS, mass_of, threshold
from kernels.coupled_sampler.sample import sample

seeds = st.integers(0, 2**32 - 1)


def kept_by_sorting(row, top_k, top_p):
    """Indices that vLLM's order of operations keeps, for a row without equal entries, in float64."""
    order = np.argsort(row)
    masked = row[order].astype(np.float64)
    if 1 <= top_k < len(row):
        masked[: len(row) - top_k] = -np.inf
    weights = np.exp(masked - masked[-1])
    cumulative = np.cumsum(weights / weights.sum())
    drop = cumulative <= 1 - top_p if top_p < 1 else np.zeros(len(row), bool)
    drop[-1] = False
    return set(order[~drop & (masked > -np.inf)].tolist())


@settings(max_examples=200, deadline=None)
@given(seed=seeds, size=st.integers(1, 400), top_k=st.integers(0, 420), percent=st.integers(1, 100))
def test_keeps_what_sorting_keeps(seed, size, top_k, percent):
    rng = np.random.default_rng(seed)
    row = rng.permutation(np.linspace(-8, 8, size)).astype(np.float32)
    # Off the round shares, so that no cumulative sum lies on the cut.
    top_p = 1.0 if percent == 100 else percent / 100 + 0.00137
    kept = set(np.flatnonzero(row >= threshold(row, top_k, top_p)).tolist())
    assert kept == kept_by_sorting(row, top_k, np.float32(top_p))


@settings(max_examples=100, deadline=None)
@given(seed=seeds, size=st.integers(1, 60), top_k=st.integers(0, 70), top_p=st.floats(0, 1.1))
def test_equal_entries_stay_or_go_together(seed, size, top_k, top_p):
    row = np.random.default_rng(seed).integers(-3, 3, size).astype(np.float32)
    kept = row[row >= threshold(row, top_k, top_p)]
    assert row.max() in kept
    if 1 <= top_k < size:
        # Never fewer than k by top-k alone, and no value below the k-th.
        assert (row >= threshold(row, top_k, 1.0)).sum() >= top_k
        assert kept.min() >= np.sort(row)[-top_k]
    if top_p >= 1 and not 1 <= top_k < size:
        assert len(kept) == size


def test_masses_are_exponentials_to_float32():
    below = -np.linspace(0, 27.4, 5000).astype(np.float32)
    exact = np.exp(below.astype(np.float64)) * 2.0**MASS_BITS
    assert (np.abs(mass_of(below) - exact) <= exact * 3e-7 + 1).all()
    assert mass_of(np.array([-27.5, -np.inf, -1e30], np.float32)).tolist() == [0, 0, 0]
    assert mass_of(np.zeros(1, np.float32)).tolist() == [1 << MASS_BITS]


def two_requests(logits, **options):
    """A request without drafts and one with a draft of token 0."""
    return sample(
        logits,
        torch.tensor([5, 6]),
        torch.tensor([0, 9]),
        options.pop("temperature", torch.ones(2)),
        torch.tensor([0]),
        torch.tensor([0, 1, 3]),
        **options,
    )


def test_top_1_is_the_largest_with_certainty():
    logits = torch.randn(3, 50)
    found = two_requests(logits, top_k=torch.tensor([1, 1]))
    assert found.tokens[:2].tolist() == logits[:2].argmax(dim=1).tolist()
    assert found.processed[0] == 0
    torch.testing.assert_close(found.logprobs[0], logits[0].log_softmax(0).max())


def test_processed_log_probabilities_are_of_what_is_kept():
    logits = torch.tensor([[3.0, 2.0, 1.0, -torch.inf]]).expand(3, 4)
    found = two_requests(logits, top_k=torch.tensor([2, 2]), temperature=torch.full((2,), 0.5))
    token = int(found.tokens[0])
    assert token in (0, 1)
    torch.testing.assert_close(found.processed[0], torch.tensor([6.0, 4.0]).log_softmax(0)[token])


def test_a_row_that_cannot_be_sampled_ends_its_request():
    logits = torch.zeros(3, 8)
    logits[1] = torch.nan
    found = two_requests(logits, top_p=torch.tensor([0.5, 0.5]))
    assert found.tokens[1:].tolist() == [INVALID, UNSAMPLED]
    assert found.counts.tolist() == [1, 1]
    assert found.logprobs.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 8, dtype=torch.float64)}, "logits must be float32, bfloat16, float16"),
        ({"logits": torch.zeros(3, 0)}, "1..4194304 columns"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds must have shape \[2\]"),
        ({"drafts": torch.zeros(2, dtype=torch.int64)}, "take 1 drafts, got 2"),
        ({"cu_rows": torch.tensor([0, 0, 3])}, "at least one row"),
        ({"top_p": torch.zeros(2, dtype=torch.float64)}, "top_p must be float32"),
        ({"backend": "numpy"}, "backend must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    ids = torch.zeros(2, dtype=torch.int64)
    arguments = {
        "logits": torch.zeros(3, 8),
        "seeds": ids,
        "positions": ids,
        "temperature": torch.ones(2),
        "drafts": torch.zeros(1, dtype=torch.int64),
        "cu_rows": torch.tensor([0, 1, 3]),
    }
    with pytest.raises(ValueError, match=message):
        sample(**arguments | change)


def test_without_numba_the_definition_samples_the_same(monkeypatch):
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 2, (7, 300)).astype(np.float32))
    logits[3] = torch.nan
    seeds, positions, cu = (
        torch.tensor([3, -4, 5]),
        torch.tensor([0, 7, 2**32 - 9]),
        torch.tensor([0, 1, 5, 7]),
    )
    options = {"top_p": torch.tensor([0.9, 1.0, 0.5]), "backend": "reference"}
    arguments = (logits, seeds, positions, torch.tensor([1.0, 0.7, 0.0]))
    right = sample(*arguments, torch.tensor([1, 2, 3, 4]), cu, **options).tokens
    drafts = torch.tensor([right[1], 2, 3, right[5]])
    expected = sample(*arguments, drafts, cu, **options)
    monkeypatch.setattr("kernels.coupled_sampler.sample.find_spec", lambda name: None)
    found = sample(*arguments, drafts, cu, **options)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.counts.tolist() == expected.counts.tolist() == [1, 2, 2]
