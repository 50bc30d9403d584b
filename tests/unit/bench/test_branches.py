"""Which choice of a drafter a token was, and what trees of choices bring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.branches import suffixes, with_reference
from bench.branches.choices import CHOICES, BranchCounts, Choices, calibrated, ranks_of
from bench.branches.earlier_policy import with_noise
from bench.branches.served import replayed
from bench.branches.trees import DraftedSample, DraftShape, decode
from bench.mismatch.decoding import ReplayedSample, StrictMetrics
from kernels.coupled_sampler.noise import gumbel
from paceline import SampleKey
from services.contracts.knobs import Knobs
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.rollouts.origin import NOWHERE
from services.generation.speculation.drafter import (
    DraftContext,
    Proposals,
    ProposalsByName,
    ProposedBranches,
    Samples,
    TokenDrafter,
)
from services.generation.speculation.knob_driven_planner import KnobDrivenPlanner
from services.generation.speculation.speculation import Speculation
from services.step_time.estimator import StepTimeEstimator
from services.step_time.prior import MeasuredStep
from tests.support.step_times import settled


@given(st.integers(0, 2**63), st.integers(1, 6), st.integers(4, 9))
def test_a_token_is_counted_by_its_place_among_logits_with_noise(seed: int, length: int, vocab: int) -> None:
    logits = np.random.default_rng(seed % 2**32).normal(size=(length, vocab)).astype(np.float32)
    order = np.stack([np.argsort(-(logits[i] + gumbel(seed, i, vocab))) for i in range(length)])
    for choice in range(vocab):
        found = ranks_of(with_noise(logits, seed), order[:, choice])
        assert found.tolist() == [min(choice, CHOICES)] * length


def test_shares_are_of_all_tokens_and_of_the_mismatches() -> None:
    found = BranchCounts.of([np.repeat([0, 1], [90, 6]), np.array([[2, 3, 3, 3]])])
    assert (found.accepted, found.saved, found.saved_by_third) == (0.9, 0.6, 0.1)
    assert BranchCounts(5, 5, 0).saved == 0.0


def test_a_lookup_ranks_what_followed_the_longest_context_first() -> None:
    index = suffixes.SuffixChoices([9], [[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 2, 6]])
    assert index.ranked([9, 1, 2], 3)[0] == [3, 4, 6]
    assert index.ranked([9, 5, 2], 3)[0] == [6, 3, 4]
    assert index.ranked([9, 7], 2)[0] == []


def test_samples_that_run_beside_each_other_know_each_other_as_far_as_they_are() -> None:
    one, other = SampleKey("p", 0), SampleKey("p", 1)
    responses = {one: [1, 2, 3], other: [7, 1, 2]}
    found = suffixes.look_up([9], [], responses)
    ranks = {
        key: suffixes.choices(found[key], response).ranks.tolist() for key, response in responses.items()
    }
    # At its third token the other has seen that 2 follows 1.
    assert ranks == {one: [[CHOICES, CHOICES]], other: [[CHOICES, 0]]}


def test_a_reference_that_holds_comes_before_a_lookup_and_one_that_does_not_behind_it() -> None:
    key, response = SampleKey("p", 0), [1, 2, 3, 4, 5, 6]
    looked_up = {key: [([2], 0.5), ([8], 0.5), ([8], 0.5), ([7], 0.5), ([6], 0.5)]}
    held = with_reference.choices(ReferenceDrafter(), {key: response}, {key: response}, looked_up)
    assert held[key].ranks.tolist() == [[0] * 5]
    wrong = with_reference.choices(ReferenceDrafter(), {key: [0, 9, 9, 9, 9, 9]}, {key: response}, looked_up)
    assert wrong[key].ranks[0].tolist() == [0, CHOICES, CHOICES, CHOICES, 0]
    none = with_reference.choices(ReferenceDrafter(), {}, {key: response}, looked_up)
    assert none[key].ranks[0].tolist() == [0, CHOICES, CHOICES, CHOICES, 0]


def _sample(ranks: list[int]) -> DraftedSample:
    row = np.array([ranks])
    shares = np.tile([0.6, 0.3, 0.05], (1, len(ranks), 1))
    return DraftedSample(4, Choices(row, np.zeros(row.shape)), shares)


def _free_rows() -> StepTimeEstimator:
    """Return step times that rows add next to nothing to."""
    shapes = [(samples, rows) for samples in (1, 2, 4) for rows in (samples, 8 * samples, 64 * samples)]
    return StepTimeEstimator([MeasuredStep(samples=n, rows=r, context=4 * n, seconds=1.0) for n, r in shapes])


@pytest.mark.parametrize(
    ("branches", "steps"),
    # Plainly a token a step. Chains end at the second choices, trees of two at the token that is neither.
    [(0, 6), (1, 3), (2, 2), (3, 2)],
)
def test_a_tree_goes_on_where_its_second_choice_is_right(branches: int, steps: int) -> None:
    found = decode([_sample([0, 1, 0, CHOICES, 0, 1])], DraftShape(branches, 4), _free_rows())
    assert found.steps == steps
    assert (found.verified > 0) == (branches > 0)


def test_a_batch_is_decoded_until_its_longest_sample_ends() -> None:
    found = decode([_sample([0]), _sample([CHOICES] * 5)], DraftShape(1, 4), _free_rows())
    assert found.steps == 5


@given(st.integers(0, 2**32))
def test_calibrated_probabilities_are_shares_of_tokens_as_certain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    certainty = rng.random((2, 4000))
    sure = certainty > 0.5
    ranks = np.where(rng.random((2, 4000)) < np.where(sure, 0.9, 0.4), 0, 1 + (rng.random((2, 4000)) < 0.5))
    known = Choices(ranks, certainty)
    asked = Choices(np.zeros((2, 2), np.int64), np.array([[0.1, 0.9], [0.1, 0.9]]))
    (found,) = calibrated([known], [asked])
    assert found.shape == (2, 2, CHOICES)
    assert found[:, :, 0] == pytest.approx(np.array([[0.4, 0.9]] * 2), abs=0.12)
    assert (found.sum(2) <= 1.0 + 1e-9).all()


class _Trees(TokenDrafter):
    """Proposes a chain that is wrong from its second token on, and what comes in its place as a branch."""

    name = "trees"

    def __init__(self, response: list[int]) -> None:
        self.response = response

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals:
        (sample,) = samples
        first, second, third, *_ = [*self.response[len(sample.response) :], 0, 0, 0]
        branches = ProposedBranches(
            np.array([[second, third]], np.int32), np.full((1, 2), 0.9), np.array([[0, 2]])
        )
        return Proposals(np.array([[first, 99]], np.int32), np.full((1, 2), 0.9), branches=branches)


@pytest.mark.parametrize(("tokens", "steps"), [(13, 3), (2, 1), (1, 0)])
def test_a_replayed_sample_takes_the_path_that_is_its_own(tokens: int, steps: int) -> None:
    """Three tokens of a tree and the one behind them a step, and the first token by prefill."""
    response = list(range(1, tokens + 1))
    step_time = StepTimeEstimator(
        [MeasuredStep(samples=1, rows=rows, context=3, seconds=1.0) for rows in (1, 2, 8, 16)]
    )
    planner = KnobDrivenPlanner(
        Knobs(mode="planner", draft_cap=4, margin=0.0), step_time, lambda _: NOWHERE, exploration=settled()
    )
    speculation = Speculation([_Trees(response)], planner, 100, StrictMetrics(), clock=lambda: 0.0)
    sample = ReplayedSample(SampleKey("p", 0), DraftContext("s", [1, 2]), response)
    found = replayed(speculation, [sample], 100, step_time)
    assert found.steps == steps
    assert found.seconds == pytest.approx(steps, rel=0.1)
