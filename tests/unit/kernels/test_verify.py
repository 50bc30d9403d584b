"""Verification of drafts, lazy and afterwards, against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coupled_sampler import INVALID, UNSAMPLED, coupled_argmax_reference, verify
from kernels.coupled_sampler.cpu import coupled_argmax, coupled_verify

draft_lengths = st.lists(st.integers(0, 6), min_size=0, max_size=12)


def cut(lengths) -> np.ndarray:
    """cu_rows of requests with so many drafts."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64) + 1)]).astype(np.int64)


def brute_force(tokens, drafts, lengths):
    tokens, drafts, counts = list(tokens), list(drafts), []
    for length in lengths:
        own, tokens = tokens[: length + 1], tokens[length + 1 :]
        guess, drafts = drafts[:length], drafts[length:]
        accepted = 0
        while accepted < length and own[accepted] == guess[accepted] and own[accepted] >= 0:
            accepted += 1
        counts.append(accepted + 1)
    return counts


@settings(max_examples=200, deadline=None)
@given(lengths=draft_lengths, seed=st.integers(0, 2**32 - 1))
def test_counts_equal_brute_force(lengths, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-1, 3, sum(lengths) + len(lengths))
    drafts = rng.integers(-1, 3, sum(lengths))
    assert verify(tokens, drafts, cut(lengths)).tolist() == brute_force(tokens, drafts, lengths)


@settings(max_examples=150, deadline=None)
@given(lengths=draft_lengths, seed=st.integers(0, 2**32 - 1), size=st.sampled_from([3, 130, 512]))
def test_lazy_verification_equals_sampling_all_rows_and_verifying(lengths, seed, size):
    rng = np.random.default_rng(seed)
    cu_rows = cut(lengths)
    rows, requests = int(cu_rows[-1]), len(lengths)
    logits = rng.normal(0, 1, (rows, size)).astype(np.float32)
    logits[rng.random(rows) < 0.05] = np.nan
    seeds = rng.integers(0, 2**64, requests, dtype=np.uint64)
    start = rng.integers(0, 1000, requests)
    temperature = rng.choice(np.array([0, 0.5, 1], dtype=np.float32), requests)
    owner = np.repeat(np.arange(requests), np.diff(cu_rows))
    within = np.arange(rows) - cu_rows[owner]
    every = coupled_argmax_reference(logits, seeds[owner], start[owner] + within, temperature[owner])
    has_draft = np.ones(rows, dtype=bool)
    has_draft[cu_rows[1:] - 1] = False
    drafts = np.where(rng.random(rows) < 0.8, every, rng.integers(0, size, rows))[has_draft]

    tokens, counts = coupled_verify(logits, seeds, start, temperature, drafts, cu_rows)

    assert counts.tolist() == brute_force(every, drafts, lengths)
    np.testing.assert_array_equal(tokens, np.where(within < counts[owner], every, UNSAMPLED))


def test_true_drafts_are_accepted_in_full_and_give_plain_decoding():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (9, 300)).astype(np.float32)
    plain = [
        int(coupled_argmax(logits[[i]], np.array([7], dtype=np.uint64), [100 + i], [1.0])[0])
        for i in range(9)
    ]
    tokens, counts = coupled_verify(logits, np.array([7], dtype=np.uint64), [100], [1.0], plain[:8], [0, 9])
    assert tokens.tolist() == plain
    assert counts.tolist() == [9]


def test_the_mismatch_is_itself_the_right_token_and_later_rows_are_not_sampled():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (4, 300)).astype(np.float32)
    arguments = (logits, np.array([7], dtype=np.uint64), [0], [1.0])
    right = coupled_verify(*arguments, [0, 0, 0], [0, 4])[0][0]
    wrong = (right + 1) % 300
    tokens, counts = coupled_verify(*arguments, [wrong, 0, 0], [0, 4])
    assert tokens.tolist() == [right, UNSAMPLED, UNSAMPLED, UNSAMPLED]
    assert counts.tolist() == [1]


def test_an_invalid_row_ends_its_request_and_no_other():
    logits = np.zeros((4, 8), dtype=np.float32)
    logits[:, 3] = 90.0
    logits[1] = np.nan
    tokens, counts = coupled_verify(logits, [1, 2], [0, 0], [1.0, 1.0], [3, 3], [0, 3, 4])
    assert tokens.tolist() == [3, INVALID, UNSAMPLED, 3]
    assert counts.tolist() == [2, 1]


@pytest.mark.parametrize("draft", [-(2**63), -1, 0, 299, 300, 2**63 - 1])
def test_a_draft_changes_no_token_even_if_it_is_masked_or_no_token_at_all(draft):
    logits = np.full((2, 300), -np.inf, dtype=np.float32)
    logits[:, 128:200] = 0.5
    logits[:, 150] = 2.0
    for seed in range(20):
        keys = (np.array([seed, seed], dtype=np.uint64), np.array([4, 5]), np.ones(2, dtype=np.float32))
        expected = coupled_argmax_reference(logits, *keys)
        tokens, counts = coupled_verify(logits, keys[0][:1], [4], [1.0], [draft], [0, 2])
        assert tokens.tolist() == [expected[0], UNSAMPLED]
        assert counts.tolist() == [1]


@pytest.mark.parametrize(
    ("cu_rows", "drafts", "message"),
    [
        ([0, 2], [1, 1], "cu_rows must ascend from 0 to the 3 rows, got 0..2"),
        ([1, 3], [1], "cu_rows must ascend"),
        ([], [], "cu_rows must ascend.*got nothing"),
        ([0, 3, 3], [1], "at least one row"),
        ([0, 4, 3], [1], "at least one row"),
        ([0, 1, 3], [1, 1], "2 requests of 3 rows take 1 drafts, got 2"),
        ([0, 1, 3], [], "take 1 drafts, got 0"),
    ],
)
def test_ragged_shapes_that_do_not_fit_are_refused(cu_rows, drafts, message):
    with pytest.raises(ValueError, match=message):
        verify([1, 1, 1], drafts, cu_rows)
    requests = max(len(cu_rows) - 1, 0)
    logits = np.zeros((3, 4), dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        coupled_verify(logits, [1] * requests, [0] * requests, [1.0] * requests, drafts, cu_rows)
