"""How far drafts would be accepted, with the samples' own noise and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.coupled_sampler import coupled_argmax_reference
from kernels.coupled_sampler.noise import gumbel
from services.drafter.learning.data import LearningSettings, TrainingSample
from services.drafter.learning.learner import Learner
from services.drafter.learning.objective import agreement
from tests.unit.drafter.learning.plain import PlainHead
from tests.unit.drafter.learning.samples import rollout

DEPTH = 3


@pytest.fixture(scope="module")
def learner(policy_path: Path) -> Learner:
    """Of a drafter that has learned a little, so that it is right now and then."""
    learner = Learner(policy_path, LearningSettings(depth=DEPTH, batch_tokens=128, lr=2e-2, warmup_steps=2))
    rollouts = sample(learner, range(24))
    for _ in range(6):
        learner.update(rollouts, [1.0] * len(rollouts))
    return learner


def sample(learner: Learner, seeds: range, length: int = 18) -> list[TrainingSample]:
    """Samples of the policy by the definition of coupled sampling."""
    prompt = (3, 1, 4)
    tokens = torch.tensor([prompt] * len(seeds))
    names = np.array([seed * 977 + (1 << 63) for seed in seeds], dtype=np.uint64)
    with torch.no_grad():
        for position in range(length):
            logits = learner.policy.model(tokens).logits[:, -1].numpy()
            where, ones = np.full(len(seeds), position), np.ones(len(seeds), dtype=np.float32)
            drawn = coupled_argmax_reference(logits, names, where, ones)
            tokens = torch.cat([tokens, torch.from_numpy(drawn)[:, None]], 1)
    return [
        rollout(prompt, tuple(line[3:]), slot, seed=int(names[slot]))
        for slot, line in enumerate(tokens.tolist())
    ]


def decode(learner: Learner, given: TrainingSample) -> tuple[int, int, int]:
    """Draft loop over one sample as an engine runs it: verifications, accepted tokens, right first places."""
    config, tensors = learner.config, learner.head.tensors()
    head = PlainHead(config, tensors)
    embed = learner.policy.model.get_input_embeddings().weight
    tokens = list(given.tokens)
    features = learner.policy.read(torch.tensor([tokens]), learner.head.shape.layers).features[0]
    done, verifications, accepted, first_right = len(given.prompt) + 1, 0, 0, 0
    rows = 0
    while done < len(tokens):
        for p in range(rows, done - 1):
            logits, hidden = head.row(embed[tokens[p + 1]], head.feature(features[p]), p)
        rows = done - 1
        draft: list[int] = []
        for place in range(min(DEPTH, len(tokens) - done)):
            position = done + place - len(given.prompt)
            noise = gumbel(given.seed, position, len(embed))
            draft.append(int(np.argmax(logits.detach().numpy() + noise)))
            logits, hidden = head.row(embed[draft[-1]], hidden, done - 1 + place)
        head.forget(len(draft))
        kept = next((k for k, token in enumerate(draft) if token != tokens[done + k]), len(draft))
        verifications, accepted, first_right = verifications + 1, accepted + kept, first_right + (kept > 0)
        done += kept + 1
    return verifications, accepted, first_right


def test_it_is_what_the_draft_loop_would_have_done(learner: Learner) -> None:
    rollouts = sample(learner, range(100, 108))
    found = learner.evaluate(rollouts)
    with torch.no_grad():
        walked = [decode(learner, each) for each in rollouts]
    assert found.verifications == sum(verifications for verifications, _, _ in walked)
    assert found.accepted == sum(accepted for _, accepted, _ in walked)
    assert found.by_place[0] == pytest.approx(sum(right for _, _, right in walked) / found.verifications)
    assert found.tokens == 8 * 17
    assert found.acceptance_length == found.tokens / found.verifications > 1.1
    assert found.with_seed == 8


def test_without_seeds_it_is_the_expectation(learner: Learner) -> None:
    rollouts = sample(learner, range(200, 328))
    drawn = learner.evaluate(rollouts)
    expected = learner.evaluate([replace(each, seed=None) for each in rollouts])
    assert expected.with_seed == 0
    assert expected.acceptance_length == pytest.approx(drawn.acceptance_length, rel=0.04)
    assert expected.by_place[0] == pytest.approx(drawn.by_place[0], rel=0.08)
    assert expected.kd_loss == drawn.kd_loss


def test_the_chance_of_agreement_is_that_of_shared_noise() -> None:
    torch.manual_seed(0)
    target, drafter = torch.randn(2, 6) * 1.5
    noise = -torch.log(-torch.log(torch.rand(400_000, 6)))
    by_target, by_drafter = (target + noise).argmax(1), (drafter + noise).argmax(1)
    for token in range(6):
        here = by_target == token
        share = float((by_drafter[here] == token).float().mean())
        found = agreement(target[None], drafter[None], torch.tensor([token]))
        assert float(found) == pytest.approx(share, abs=0.01)


def test_agreement_at_the_edges() -> None:
    target = torch.tensor([[0.0, 1.0, 2.0]])
    assert float(agreement(target, target + 3, torch.tensor([1]))) == pytest.approx(1)
    without = torch.tensor([[0.0, -torch.inf, 2.0]])
    assert float(agreement(target, without, torch.tensor([1]))) == 0
    assert float(agreement(target, without, torch.tensor([0]))) == pytest.approx(1), (
        "what it lost is its gain"
    )
