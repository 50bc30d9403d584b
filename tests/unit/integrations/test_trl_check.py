"""The integration with TRL compares the fleet's policy with the trainer's, and refuses another one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import FinishReason, Group, PolicyMismatchError, Provenance, Sample, SampleRequest, SampleStatus
from paceline.integrations.trl import PacelineRollout

PROMPTS = [[1, 2, 3], [1, 2, 3], [4], [4]]


class TinyPolicy(torch.nn.Module):
    """A model that looks at the last two tokens, with dropout and an interface of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(16, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 16)

    def forward(
        self, input_ids: Any, attention_mask: Any, use_cache: bool = True, logits_to_keep: int = 0
    ) -> Any:
        hidden = self.embed(input_ids)
        hidden = self.drop(torch.cat([hidden[:, :1], hidden[:, 1:] + hidden[:, :-1]], dim=1))
        return SimpleNamespace(logits=self.head(hidden[:, -logits_to_keep:]))


class Fleet:
    """A run that samples the weights that were pushed, and computes in bfloat16."""

    def __init__(self, changes: Any = lambda weights: weights) -> None:
        self.changes = changes
        self.model = TinyPolicy().eval()
        self.checks: list[int] = []
        self.pushes = 0
        self.client = self

    def push_weights(self, weights: Mapping[str, Any], *, in_flight: object) -> None:
        self.pushes += 1
        self.model.load_state_dict(self.changes({name: each.clone() for name, each in weights.items()}))

    def rollout(self, step: int, groups: Any, sampling: Any, *, exactness: object = None) -> Any:
        samples = Samples()
        for group in groups:
            samples += [self.sample(group, slot, sampling) for slot in range(group.samples)]
        return samples

    def deployments(self) -> list[Any]:
        self.checks.append(self.pushes)
        return [self]

    def generate(self, request: SampleRequest) -> list[Sample]:
        return [self.sample(request, request.slot, request.sampling)]

    def sample(self, group: Group | SampleRequest, slot: int, sampling: Any) -> Sample:
        torch.manual_seed(slot)
        ids, logprobs = list(group.prompt_token_ids), []
        for _ in range(sampling.max_tokens):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                logits = self.model(torch.tensor([ids]), None, logits_to_keep=1).logits[0, -1].float()
            ids.append(int(torch.multinomial(logits.softmax(-1), 1)))
            logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
        return Sample(
            prompt_id=group.prompt_id,
            slot=slot,
            token_ids=np.array(ids[len(group.prompt_token_ids) :]),
            logprobs=np.array(logprobs, np.float32),
            finish_reason=FinishReason.LENGTH,
            status=SampleStatus.TRUNCATED,
            version_spans=(),
            provenance=Provenance(),
            seed=0,
        )


class Samples(list[Sample]):
    batch = SimpleNamespace(policy_version=1)

    def stats(self) -> dict[str, float]:
        return {}


def trainer(model: Any) -> Any:
    made = SimpleNamespace(
        args=SimpleNamespace(
            use_vllm=False, generation_kwargs=None, steps_per_generation=1, gradient_accumulation_steps=1
        ),
        model=model.train(),
        model_wrapped=model,
        state=SimpleNamespace(global_step=0, max_steps=9),
        processing_class=object(),
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=4,
        eos_token_ids=[2],
        num_iterations=1,
        logged=[],
        accelerator=SimpleNamespace(
            num_processes=1,
            process_index=0,
            is_main_process=True,
            device="cpu",
            unwrap_model=lambda model: model,
            get_state_dict=lambda model: model.state_dict(),
            autocast=nullcontext,
        ),
        _tokenize_prompts=lambda prompts: (prompts, None, {}),
    )
    made._log_metric = lambda name, value: made.logged.append((name, value))
    return made


def train(rollout: PacelineRollout, one: Any, steps: int) -> None:
    for step in range(steps):
        one.state.global_step = step
        rollout(PROMPTS, one)
        rollout(PROMPTS, one)
        with torch.no_grad():
            one.model.embed.weight += 0.2 * torch.randn_like(one.model.embed.weight)


def test_the_trainers_policy_is_checked_after_the_first_push_and_ever_more_rarely() -> None:
    fleet, one = Fleet(), trainer(TinyPolicy())
    train(PacelineRollout(fleet, hints=False), one, 9)  # type: ignore[arg-type]
    assert (fleet.checks, fleet.pushes) == ([1, 2, 4, 8], 9)
    gaps = [value for name, value in one.logged if name == "rollout/policy_gap"]
    assert len(gaps) == 4
    assert all(gap < 0.02 for gap in gaps)
    assert one.model.training
    assert one.model.drop.training


def another_head(weights: dict[str, Any]) -> dict[str, Any]:
    return {**weights, "head.weight": torch.zeros_like(weights["head.weight"])}


def test_another_policy_is_refused_before_it_is_sampled() -> None:
    fleet, one = Fleet(another_head), trainer(TinyPolicy())
    with pytest.raises(PolicyMismatchError, match="policy_tolerance"):
        PacelineRollout(fleet, hints=False)(PROMPTS, one)  # type: ignore[arg-type]
    assert one.model.training
    rollout = PacelineRollout(fleet, hints=False, policy_tolerance=None)  # type: ignore[arg-type]
    assert len(rollout(PROMPTS, one)["completion_ids"]) == 4
    assert fleet.checks == [1]


def test_a_policy_that_becomes_another_later_is_found() -> None:
    """As an adapter that is pushed wrong, and is zero at the start."""
    start = deepcopy(TinyPolicy().state_dict())

    def of_the_start(weights: dict[str, Any]) -> dict[str, Any]:
        return {**weights, "embed.weight": start["embed.weight"]}

    one = trainer(TinyPolicy())
    rollout = PacelineRollout(Fleet(of_the_start), hints=False)  # type: ignore[arg-type]
    with pytest.raises(PolicyMismatchError):
        train(rollout, one, 5)
    assert 1 <= one.state.global_step <= 3


def test_a_model_whose_forward_is_another_is_trained_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    class Seeing(TinyPolicy):
        def forward(self, pixels: Any) -> Any:
            raise NotImplementedError

    fleet = Fleet()
    with caplog.at_level(logging.WARNING, "paceline"):
        PacelineRollout(fleet, hints=False)(PROMPTS, trainer(Seeing()))  # type: ignore[arg-type]
    assert fleet.checks == [1]
    assert "the policy is not compared with the fleet's: TypeError" in caplog.text
