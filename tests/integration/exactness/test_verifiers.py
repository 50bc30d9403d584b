"""Both verifiers by themselves, 100,000 samples each: whatever the drafts, the distribution of the policy.

No engine, and a table for a policy: this counts what a real one is too slow to count. Seeds are fixed
and neighbours of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.coupled_sampler import INVALID, UNSAMPLED, Purpose
from kernels.coupled_sampler.cpu import coupled_argmax, coupled_verify
from kernels.coupled_sampler.proposals import RowProposals, log_odds, uniforms
from kernels.coupled_sampler.sample import sample
from tests.support.chi_square import chi_square, histogram

VOCAB, COUNT, LENGTH = 11, 100_000, 3
UNLIKELY = 1e-3
# The logits after each token; a sequence starts after token 0. The drafter's policy is another, not far away.
TABLE = np.random.default_rng(1).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
OTHER = (TABLE + np.random.default_rng(2).normal(0, 0.7, TABLE.shape)).astype(np.float32)
SEEDS = np.arange(COUNT, dtype=np.uint64)
Integers = npt.NDArray[np.int64]


def _softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    result: npt.NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return result


P, Q = _softmax(TABLE), _softmax(OTHER)
TRUTH = P[0][:, None, None] * P[:, :, None] * P[None, :, :]


def _draft_random(last: Integers, seeds: Any, position: Integers, random: Any) -> Integers:
    return random.integers(0, VOCAB, len(last))  # type: ignore[no-any-return]


def _draft_best(last: Integers, seeds: Any, position: Integers, random: Any) -> Integers:
    return TABLE[last].argmax(axis=1)


def _draft_coupled(last: Integers, seeds: Any, position: Integers, random: Any) -> Integers:
    """What another policy samples with the same noise: a pre-generated draft."""
    return coupled_argmax(OTHER[last], seeds, position, np.ones(len(last)))


def _draft_sampled(last: Integers, seeds: Any, position: Integers, random: Any) -> Integers:
    """Return a sample of Q, with noise of its own."""
    return (Q[last].cumsum(axis=1) < random.random(len(last))[:, None]).sum(axis=1).clip(max=VOCAB - 1)


def _rejection(
    logits: Any,
    seeds: Any,
    positions: Integers,
    temperature: Any,
    drafts: Integers,
    cu: Any,
    scale: float = 1.0,
) -> tuple[Integers, Integers]:
    """Verify drafts by rejection, as the engine asks the kernels to; with a `scale`, wrongly."""
    cu = np.asarray(cu, np.int64)
    owner = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    drafted = np.delete(np.arange(cu[-1]), cu[1:] - 1)
    tokens, theta = np.full(cu[-1], -1), np.full(cu[-1], np.nan)
    tokens[drafted] = drafts
    places = positions[owner] + np.arange(cu[-1]) - cu[owner]
    own, where = (torch.from_numpy(part) for part in (seeds.view(np.int64)[owner[drafted]], places[drafted]))
    theta[drafted] = scale * uniforms(own, where, Purpose.REJECTION).numpy()
    proposals = RowProposals(
        torch.from_numpy(tokens),
        log_odds(torch.from_numpy(theta)),
        torch.zeros(len(owner), dtype=torch.bool),
        torch.ones(len(seeds), dtype=torch.bool),
    )
    found = sample(
        *(
            torch.from_numpy(part)
            for part in (logits, seeds.view(np.int64), positions, temperature, drafts, cu)
        ),
        proposals=proposals,
    )
    return found.tokens.numpy(), found.counts.numpy()


DRAFTS = {"random": _draft_random, "best": _draft_best, "coupled": _draft_coupled, "sampled": _draft_sampled}


def _generate(
    verify: Callable[..., tuple[Integers, Integers]],
    draft: Callable[..., Integers],
    drafts: int,
    count: int = COUNT,
) -> tuple[Integers, int]:
    """Three tokens of every seed, with up to `drafts` draft tokens a step; and how many were accepted."""
    random = np.random.default_rng(3)
    # The start token lies before the first position; a step may emit more than is kept.
    found = np.zeros((count, LENGTH + drafts + 2), np.int64)
    filled, accepted = np.zeros(count, np.int64), 0
    while (filled < LENGTH).any():
        live = np.flatnonzero(filled < LENGTH)
        context = [found[live, filled[live]]]
        for j in range(drafts):
            context.append(draft(context[-1], SEEDS[live], filled[live] + j, random))
        last = np.stack(context, axis=1)
        cu = np.arange(len(live) + 1) * (drafts + 1)
        ones = np.ones(len(live), np.float32)
        tokens, counts = verify(TABLE[last.ravel()], SEEDS[live], filled[live], ones, last[:, 1:].ravel(), cu)
        for j in range(drafts + 1):
            here = np.flatnonzero(counts > j)
            found[live[here], filled[live[here]] + j + 1] = tokens[cu[here] + j]
        filled[live] += counts
        accepted += int((counts - 1).sum())
    return found[:, 1 : LENGTH + 1], accepted


@pytest.fixture(scope="module")
def plain() -> Integers:
    """What coupled sampling gives without drafts."""
    return _generate(coupled_verify, _draft_random, 0)[0]


@pytest.mark.parametrize("draft", DRAFTS)
def test_coupled_tokens_are_the_policys_and_the_same_for_every_draft(plain: Integers, draft: str) -> None:
    found, accepted = _generate(coupled_verify, DRAFTS[draft], 2)
    assert (found == plain).all()
    assert accepted > 0
    assert chi_square(histogram(found, VOCAB), TRUTH * COUNT) > UNLIKELY


def test_neighbouring_seeds_and_positions_are_independent(plain: Integers) -> None:
    marginal = [TRUTH.sum(axis=tuple({0, 1, 2} - {i})) for i in range(LENGTH)]
    for distance in (1, 2, 1024):
        for ours in range(LENGTH):
            for theirs in range(LENGTH):
                pairs = np.stack((plain[:-distance, ours], plain[distance:, theirs]), axis=1)
                expected = np.outer(marginal[ours], marginal[theirs]) * len(pairs)
                assert chi_square(histogram(pairs, VOCAB), expected) > UNLIKELY, (distance, ours, theirs)


@pytest.mark.parametrize(("draft", "drafts"), [("random", 0), *product(DRAFTS, (1, 3))])
def test_rejection_samples_the_policy_whatever_the_drafts(draft: str, drafts: int) -> None:
    found, accepted = _generate(_rejection, DRAFTS[draft], drafts)
    assert chi_square(histogram(found, VOCAB), TRUTH * COUNT) > UNLIKELY
    assert (accepted > 0) == (drafts > 0)


def test_a_wrong_rule_shows() -> None:
    """The test can fail: drafts that are accepted more often than the policy has them leave it."""
    found, _ = _generate(partial(_rejection, scale=0.7), _draft_best, 1)
    assert chi_square(histogram(found, VOCAB), TRUTH * COUNT) < 1e-6


def test_rejection_repeats() -> None:
    first, _ = _generate(_rejection, _draft_best, 2, 5_000)
    second, _ = _generate(_rejection, _draft_best, 2, 5_000)
    assert (first == second).all()


def test_rejection_at_temperature_zero_takes_the_best_token() -> None:
    logits = TABLE[:3]
    best = logits.argmax(axis=1)
    zero, seeds, start = np.zeros(1, np.float32), SEEDS[:1], np.zeros(1, np.int64)
    cu = np.array([0, 3])
    tokens, counts = _rejection(logits, seeds, start, zero, best[:2], cu)
    assert (counts == 3).all()
    assert (tokens == best).all()
    wrong = np.array([best[0], (best[1] + 1) % VOCAB])
    tokens, counts = _rejection(logits, seeds, start, zero, wrong, cu)
    assert counts.tolist() == [2]
    assert tokens.tolist() == [best[0], best[1], UNSAMPLED]


def test_a_row_that_cannot_be_sampled_ends_its_sample_alone() -> None:
    logits = np.concatenate((TABLE[:2], TABLE[:2]))
    logits[0, 4] = np.nan
    one, seeds, start = np.ones(2, np.float32), SEEDS[:2], np.zeros(2, np.int64)
    tokens, counts = _rejection(logits, seeds, start, one, np.array([4, 5]), np.array([0, 2, 4]))
    assert (tokens[0], counts[0]) == (INVALID, 1)
    assert tokens[2] >= 0
