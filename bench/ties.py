"""Near-ties between two runs whose tokens differ.

A sampled token is the arg-max of logit/T + noise. Both are computed here once more, apart from the platform: the
logits by transformers in float64, the noise by the reference of the coupled sampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.comparison import Difference
from bench.training import Samples
from bench.trajectory import Trajectory
from kernels.coupled_sampler.noise import gumbel

NEAR = 1e-4
"""Scores closer than this may change places: logits in float32 vary with the shape of a batch."""


@dataclass(frozen=True, slots=True)
class Tie:
    """The scores at a difference. `best` is the token that the judge would sample, `second` the runner-up."""

    difference: Difference
    best: int
    second: int
    gap: float
    """Score of the best less score of the second."""

    @property
    def near(self) -> bool:
        """Return True if rounding explains a difference: the two tokens are the two best, and close."""
        return self.gap < NEAR and {self.best, self.second} == {
            self.difference.expected,
            self.difference.found,
        }


class Judge:
    """Holds the weights that it used last."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._model: torch.nn.Module | None = None

    def judge(
        self,
        difference: Difference,
        weights: Path,
        prompt: Sequence[int],
        response: Sequence[int],
        seed: int,
        temperature: float,
    ) -> Tie:
        """Return the two best tokens at the difference, after the response's own tokens before it."""
        before = [*prompt, *response[: difference.position]]
        with torch.inference_mode():
            logits = self._load(weights)(torch.tensor([before])).logits[0, -1].double().numpy()
        scores = logits / temperature + gumbel(seed, difference.position, len(logits)).astype(np.float64)
        second, best = (int(token) for token in np.argsort(scores)[-2:])
        return Tie(difference, best, second, float(scores[best] - scores[second]))

    def _load(self, weights: Path) -> torch.nn.Module:
        if self._model is None or self._folder != weights:
            model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64)
            self._model, self._folder = model.eval(), weights
        return self._model


def judge_all(
    differences: Iterable[Difference], trajectory: Trajectory, plain: Sequence[Samples], judge: Judge
) -> list[Tie]:
    """Judge every difference from plain decoding's samples, step by step with the trajectory's weights."""
    temperature = trajectory.options.temperature
    assert temperature is not None, "the options name one"
    steps = {step.step: (step, truth) for step, truth in zip(trajectory.steps, plain, strict=True)}
    found = []
    for difference in differences:
        (step, truth), key = steps[difference.step], difference.key
        prompts = {group.prompt_id: group.prompt_token_ids for group in step.groups}
        sample = truth[key]
        found.append(
            judge.judge(
                difference,
                step.weights,
                [int(token) for token in prompts[key.prompt_id]],
                sample.token_ids.tolist(),
                sample.seed,
                temperature,
            )
        )
    return found
