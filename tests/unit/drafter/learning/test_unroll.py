"""The unroll in training computes what the draft loop will."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.drafter.learning.data import LearningSettings
from services.drafter.learning.head import Eagle3Head
from services.drafter.learning.target import TargetModel
from services.drafter.learning.unroll import Unroll, make_pass
from tests.unit.drafter.learning.plain import PlainHead, draft_logits
from tests.unit.drafter.learning.samples import random_rollouts

SETTINGS = LearningSettings(depth=4)


def make_head(policy: TargetModel, settings: LearningSettings = SETTINGS) -> Eagle3Head:
    """Return a head with nothing left as it was initialised."""
    torch.manual_seed(3)
    head = Eagle3Head(policy.head_shape(settings))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return head


@pytest.mark.parametrize("chunk_entries", [1 << 26, 600])
def test_every_place_of_every_draft_has_the_logits_of_the_loop(policy_path: Path, chunk_entries: int) -> None:
    policy = TargetModel(policy_path, 0, SETTINGS)
    head = make_head(policy)
    rollouts = random_rollouts(4, policy.vocabulary, seed=1)
    rows = make_pass(rollouts, torch.device("cpu"))
    with torch.no_grad():
        seen = policy.read(rows.tokens, head.shape.layers)
        outputs = Unroll(head, chunk_entries)(seen.features, seen.embeddings, SETTINGS.depth, rows.first)
        embed = policy.model.get_input_embeddings().weight
        compared = 0
        for i, rollout in enumerate(rollouts):
            loop = PlainHead(head.shape.config(), head.tensors())
            alone = policy.read(torch.tensor([rollout.tokens]), head.shape.layers).features[0]
            expected = draft_logits(
                loop, list(rollout.tokens), alone, embed, len(rollout.prompt), SETTINGS.depth
            )
            for place, output in enumerate(outputs):
                about = rows.drafted_at(place)
                about = about[rows.rollout[about] == i]
                logits = head.logits(output[rows.chain(about, place)])
                for row, found in zip(about.tolist(), logits, strict=True):
                    start = int(rows.behind[row]) - 1 - place
                    torch.testing.assert_close(found, expected.pop((start, place)), rtol=2e-4, atol=2e-4)
                    compared += 1
            assert not expected, "the loop drafts nothing that is not learned"
    assert compared > 50


def test_a_place_sees_its_own_drafts_and_not_the_policys_later_features(policy_path: Path) -> None:
    """What the policy has behind a draft's start changes none of its places; what it has before does."""
    policy = TargetModel(policy_path, 0, SETTINGS)
    head = make_head(policy)
    tokens = torch.randint(policy.vocabulary, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = policy.read(tokens, head.shape.layers)
        changed = seen.features.clone()
        changed[:, 6:] += 1.0
        plain, other = (Unroll(head, 1 << 20)(f, seen.embeddings, 4, 0) for f in (seen.features, changed))
    for before, after in zip(plain, other, strict=True):
        torch.testing.assert_close(before[:, :6], after[:, :6])
        assert not torch.allclose(before[:, 6], after[:, 6])


def test_blocks_change_neither_outputs_nor_gradients(policy_path: Path) -> None:
    policy = TargetModel(policy_path, 0, SETTINGS)
    head = make_head(policy)
    rows = make_pass(random_rollouts(3, policy.vocabulary, seed=2), torch.device("cpu"))
    seen = policy.read(rows.tokens, head.shape.layers)
    gradients = []
    for chunk_entries in (1 << 26, 600):
        head.zero_grad()
        outputs = Unroll(head, chunk_entries)(seen.features, seen.embeddings, 4, rows.first)
        sum(output.pow(2).mean() for output in outputs).backward()
        gradients.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-5)


def test_a_short_rollout_has_fewer_places(policy_path: Path) -> None:
    policy = TargetModel(policy_path, 0, SETTINGS)
    head = make_head(policy)
    seen = policy.read(torch.tensor([[1, 2, 3]]), head.shape.layers)
    outputs = Unroll(head, 1 << 20)(seen.features, seen.embeddings, 4, 0)
    assert [output.shape[1] for output in outputs] == [2, 1]


def test_features_are_the_named_layers_outputs(policy_path: Path) -> None:
    policy = TargetModel(policy_path, 0, SETTINGS)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        hidden = policy.model(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(policy.read(tokens, (1, 3)).features, torch.cat([hidden[1], hidden[3]], -1))
