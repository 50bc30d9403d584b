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
from tests.support.draft_policies import POLICIES, Drafts
from tests.support.oracle import Oracle

pytestmark = pytest.mark.timeout(400)

PROMPT = (3, 4)
# About 45 samples for each of the 1,331 sequences.
COUNT = 60_000
# The chance that a test of this kind fails without cause, were its seeds not fixed.
UNLIKELY = 1e-3


def enumerate_sequences(oracle: Oracle, prompt: tuple[int, ...], vocab_size: int) -> npt.NDArray[np.float64]:
    """Probability of every sequence of three tokens, [V, V, V]."""

    def after(tokens: tuple[int, ...]) -> npt.NDArray[np.float64]:
        row = oracle.logits([*prompt, *tokens])[-1]
        weights = np.exp(row - row.max())
        result: npt.NDArray[np.float64] = weights / weights.sum()
        return result

    first = after(())
    second = np.stack([after((a,)) for a in range(vocab_size)])
    third = np.stack([after(pair) for pair in product(range(vocab_size), repeat=2)])
    return first[:, None, None] * second[:, :, None] * third.reshape(vocab_size, vocab_size, vocab_size)


@pytest.fixture(scope="module")
def truth(llama: Bench) -> npt.NDArray[np.float64]:
    return enumerate_sequences(llama.oracle, PROMPT, llama.host.vocab_size)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
@pytest.mark.parametrize("sampling", [T1, T06], ids=["T=1", "T=0.6, top-p"])
def test_a_padded_vocabulary_changes_nothing(llama: Bench, sampling: Sampling, policy: str) -> None:
    requests = requests_of(llama.host.vocab_size, replace(sampling, ignore_eos=True), count=16)
    plain = run(llama, requests)
    found = run(llama, requests, drafts=Drafts(policy, truth=plain.tokens))
    assert found.tokens == plain.tokens
    llama.check(requests, found)


def test_plain_and_speculative_decoding_sample_the_policy(
    llama: Bench, truth: npt.NDArray[np.float64]
) -> None:
    """Neighbouring seeds throughout: a correlation between them would show in the pairs."""
    vocab_size = llama.host.vocab_size
    plain = llama.host.count(Census(PROMPT, COUNT)).tokens
    drafted = llama.host.count(Census(PROMPT, COUNT, drafts=2))
    # Not the same distribution only: the same tokens.
    assert (drafted.tokens == plain).all()
    assert drafted.drafted > COUNT
    assert drafted.accepted > COUNT / 20
    assert chi_square(histogram(plain, vocab_size), truth * COUNT) > UNLIKELY

    first = truth.sum(axis=(1, 2))
    for distance in (1, 2, 64):
        pairs = np.stack((plain[:-distance, 0], plain[distance:, 0]), axis=1)
        expected = np.outer(first, first) * len(pairs)
        assert chi_square(histogram(pairs, vocab_size), expected) > UNLIKELY, distance
    # A seed's token at one position and its neighbour's at the next: shared noise would show here.
    second = truth.sum(axis=(0, 2))
    across = np.stack((plain[:-1, 1], plain[1:, 0]), axis=1)
    assert chi_square(histogram(across, vocab_size), np.outer(second, first) * len(across)) > UNLIKELY


def test_rejection_samples_the_policy_and_repeats(llama: Bench, truth: npt.NDArray[np.float64]) -> None:
    census = Census(PROMPT, COUNT, drafts=2, verifier=Verifier.REJECTION)
    found = llama.host.count(census)
    assert found.accepted > COUNT / 20
    assert chi_square(histogram(found.tokens, llama.host.vocab_size), truth * COUNT) > UNLIKELY
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
