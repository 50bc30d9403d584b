"""The tokens are samples of the policy: counted against the distribution that transformers gives, exactly.

Every census has fixed seeds, so a test gives the same figures in every run. 11 tokens, which vLLM pads to 64.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import Verifier
from tests.integration.exactness.conftest import T06, T1, Bench, requests_of, run
from tests.support.census import Census
from tests.support.chi_square import chi_square, histogram
from tests.support.draft_policies import Drafts

pytestmark = pytest.mark.timeout(400)

PROMPT = (3, 4)
# Samples, and a temperature that so many tell from 1 in every run: what a test can miss is smaller. Of 1,331
# sequences the 337 likeliest are counted each by itself with few samples, 1,096 with many.
COUNTS = [
    pytest.param(8_000, 1.15, id="8,000"),
    pytest.param(60_000, 1.06, id="60,000", marks=pytest.mark.soak),
]
# The chance that a test of this kind fails without cause, were its seeds not fixed.
UNLIKELY = 1e-3
Probabilities = npt.NDArray[np.float64]


def enumerate_sequences(bench: Bench, temperature: float = 1.0) -> Probabilities:
    """Return the probability of every sequence of three tokens, [V, V, V]."""
    oracle, vocab_size = bench.oracle, bench.host.vocab_size

    def after(tokens: tuple[int, ...]) -> Probabilities:
        row = oracle.logits([*PROMPT, *tokens])[-1] / temperature
        weights = np.exp(row - row.max())
        result: Probabilities = weights / weights.sum()
        return result

    first = after(())
    second = np.stack([after((a,)) for a in range(vocab_size)])
    third = np.stack([after(pair) for pair in product(range(vocab_size), repeat=2)])
    return first[:, None, None] * second[:, :, None] * third.reshape(vocab_size, vocab_size, vocab_size)


@pytest.fixture(scope="module")
def truth(llama: Bench) -> Probabilities:
    return enumerate_sequences(llama)


def is_of(truth: Probabilities, tokens: npt.NDArray[np.uint16]) -> bool:
    """Whether sequences may be samples of the policy: together, and the tokens of each position by themselves."""
    counts = histogram(tokens, len(truth))
    others = ((1, 2), (0, 2), (0, 1))
    views = [(counts, truth), *((counts.sum(each), truth.sum(each)) for each in others)]
    return min(chi_square(observed, of * len(tokens)) for observed, of in views) > UNLIKELY / len(views)


# Of the kinds of drafts that `test_tokens` goes through: right ones, wrong ones, and both.
@pytest.mark.parametrize("policy", ["true", "random", "varying"])
@pytest.mark.parametrize("sampling", [T1, T06], ids=["T=1", "T=0.6, top-p"])
def test_a_padded_vocabulary_changes_nothing(llama: Bench, sampling: Sampling, policy: str) -> None:
    requests = requests_of(llama.host.vocab_size, replace(sampling, ignore_eos=True), count=16)
    plain = run(llama, requests)
    found = run(llama, requests, drafts=Drafts(policy, truth=plain.tokens))
    assert found.tokens == plain.tokens
    llama.check(requests, found)


@pytest.mark.parametrize(("count", "hotter"), COUNTS)
def test_plain_and_speculative_decoding_sample_the_policy(
    llama: Bench, truth: Probabilities, count: int, hotter: float
) -> None:
    """Neighbouring seeds throughout: a correlation between them would show in the pairs."""
    vocab_size = llama.host.vocab_size
    plain = llama.host.count(Census(PROMPT, count)).tokens
    drafted = llama.host.count(Census(PROMPT, count, drafts=2))
    # Not the same distribution only: the same tokens.
    assert (drafted.tokens == plain).all()
    assert drafted.drafted > count
    assert drafted.accepted > count / 20
    assert is_of(truth, plain)
    # The test can fail.
    assert not is_of(enumerate_sequences(llama, hotter), plain)

    first = truth.sum(axis=(1, 2))
    for distance in (1, 2, 64):
        pairs = np.stack((plain[:-distance, 0], plain[distance:, 0]), axis=1)
        expected = np.outer(first, first) * len(pairs)
        assert chi_square(histogram(pairs, vocab_size), expected) > UNLIKELY, distance
    # A seed's token at one position and its neighbour's at the next: shared noise would show here.
    second = truth.sum(axis=(0, 2))
    across = np.stack((plain[:-1, 1], plain[1:, 0]), axis=1)
    assert chi_square(histogram(across, vocab_size), np.outer(second, first) * len(across)) > UNLIKELY


@pytest.mark.parametrize(("count", "hotter"), COUNTS)
def test_rejection_samples_the_policy_and_repeats(
    llama: Bench, truth: Probabilities, count: int, hotter: float
) -> None:
    """`test_verifiers` counts far more samples of a policy that is a table."""
    census = Census(PROMPT, count, drafts=2, verifier=Verifier.REJECTION)
    found = llama.host.count(census)
    assert found.accepted > count / 20
    assert is_of(truth, found.tokens)
    assert not is_of(enumerate_sequences(llama, hotter), found.tokens)
    again = llama.host.count(Census(PROMPT, 500, drafts=2, verifier=Verifier.REJECTION))
    assert (again.tokens == found.tokens[:500]).all()


def test_both_verifiers_share_a_batch(llama: Bench) -> None:
    """Coupled samples keep their tokens beside samples that are verified by rejection."""
    requests = requests_of(llama.host.vocab_size, T1, count=16)
    plain = run(llama, requests)
    mixed = tuple(replace(r, verifier=Verifier.REJECTION) if i % 2 else r for i, r in enumerate(requests))
    found = run(llama, mixed, drafts=Drafts("random", truth=plain.tokens))
    coupled = [r.sample_id for r in requests[::2]]
    assert {key: found.tokens[key] for key in coupled} == {key: plain.tokens[key] for key in coupled}
    others = [r.sample_id for r in requests[1::2]]
    assert any(found.tokens[key] != plain.tokens[key] for key in others)
    assert all(len(found.tokens[key]) == len(found.logprobs[key]) > 0 for key in others)
