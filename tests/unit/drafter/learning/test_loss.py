"""The part of the loss that is about acceptance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.learning.data import LearningSettings, Targets
from services.drafter.learning.learner import Learner
from services.drafter.learning.objective import agreement, rejection
from tests.unit.drafter.learning.conftest import VOCABULARY
from tests.unit.drafter.learning.samples import random_rollouts


@given(st.integers(0, 1000), st.floats(0.1, 12.0), st.integers(2, 9))
def test_it_is_what_evaluation_expects_whatever_the_head_can_draft(
    seed: int, scale: float, drafted: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, head = torch.randn(2, 12, 9, generator=generator) * scale
    tokens = torch.randperm(9, generator=generator)[:drafted].sort().values
    sampled = torch.randint(9, (12,), generator=generator)
    wide = torch.full_like(head, -torch.inf)
    wide[:, tokens] = head[:, tokens]
    inside = policy[:, tokens]
    mass = (inside.logsumexp(-1) - policy.logsumexp(-1)).exp()
    place = {token: row for row, token in enumerate(tokens.tolist())}
    row = torch.tensor([place.get(token, -1) for token in sampled.tolist()])
    found = rejection(inside, head[:, tokens], mass, row)
    assert torch.allclose(found.double(), 1 - agreement(policy, wide, sampled), atol=1e-4)


def test_a_token_that_cannot_be_drafted_teaches_nothing_and_one_far_off_no_nan() -> None:
    mine = torch.tensor([[0.0, 1.0, 2.0], [-500.0, 500.0, 0.0], [0.0, 1.0, 2.0]], requires_grad=True)
    theirs = torch.tensor([[1.0, 1.0, 1.0], [500.0, 0.0, 0.0], [1.0, -torch.inf, 0.0]])
    lost = rejection(theirs, mine, torch.tensor([0.5, 1.0, 1.0]), torch.tensor([-1, 0, 1]))
    lost.sum().backward()
    assert lost.tolist() == [1, 1, 1]
    assert mine.grad is not None
    assert not mine.grad.isnan().any()
    assert not mine.grad[0].any()
    assert not mine.grad[2].any(), "its target leaves the sampled token out"


def test_its_gradient_makes_the_drafted_token_the_sampled_one() -> None:
    theirs = torch.tensor([[1.0, 0.5, 0.0, -3.0]])
    mine = torch.zeros(1, 4, requires_grad=True)
    for step in range(200):
        losses = [rejection(theirs, mine, torch.ones(1), torch.tensor([token])) for token in range(4)]
        weighed = sum(p * loss for p, loss in zip(theirs.softmax(-1)[0], losses, strict=True))
        (gradient,) = torch.autograd.grad(weighed.sum(), mine)  # type: ignore[union-attr]
        # The loss has a kink where the two agree, about which steps of one length go back and forth for ever.
        mine = (mine - 2.0 / (1 + step / 10) * gradient).detach().requires_grad_()
    assert torch.allclose(mine.softmax(-1), theirs.softmax(-1), atol=0.05), "nothing beats the policy itself"


@pytest.mark.parametrize("targets", list(Targets))
def test_chunks_change_nothing(policy_path: Path, targets: Targets) -> None:
    settings = LearningSettings(depth=3, batch_tokens=48, acceptance_share=0.7, targets=targets, top_k=3)
    rollouts = random_rollouts(6, VOCABULARY, seed=4)
    found = []
    for entries in (1 << 26, 5 * VOCABULARY):
        learner = Learner(policy_path, replace(settings, chunk_entries=entries))
        report = learner.update(rollouts, [1.0] * len(rollouts))
        assert report.skipped == 0
        found.append(learner.head.tensors())
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-5) for name in found[0])
