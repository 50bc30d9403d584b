"""Choices of an EAGLE-3 head that was trained on the first step of a recorded run, and then left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bench.branches.choices import CHOICES, Choices, lead, ranks_of
from bench.branches.earlier_policy import noise_of
from bench.training import TrainedStep
from paceline import SampleKey
from services.drafter.learning.batches import make_pass
from services.drafter.learning.data import TrainingSample
from services.drafter.learning.learner import Learner
from services.drafter.learning.settings import LearningSettings
from services.drafter.learning.unroll import Unroll


class HeadChoices:
    """A head, asked along samples of any version of its policy."""

    def __init__(self, model: Path, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._learner = Learner(model, LearningSettings(), checkpoint)

    def choices(self, step: TrainedStep, place: int, coupled: bool) -> dict[SampleKey, Choices]:
        """Return the choices for the samples of a step: with their noise, as instances draft, or by probability."""
        self._learner.set_policy(step.weights, place)
        prompts = {
            group.prompt_id: tuple(int(each) for each in group.prompt_token_ids) for group in step.groups
        }
        found = {}
        for key, sample in step.samples.items():
            response = tuple(sample.token_ids.tolist())
            training = TrainingSample(
                "", "", key.prompt_id, key.slot, place, prompts[key.prompt_id], response, None, sample.seed
            )
            found[key] = self._along(training, coupled)
        return found

    @torch.no_grad()
    def _along(self, sample: TrainingSample, coupled: bool) -> Choices:
        settings, head, policy = self._learner.settings, self._learner.head, self._learner.policy
        shape = (settings.depth, sample.drafted)
        ranks, certainty = np.full(shape, CHOICES, np.int64), np.zeros(shape)
        if not sample.drafted:
            return Choices(ranks, certainty)
        rows = make_pass([sample], policy.device)
        seen = policy.read(rows.tokens, head.shape.layers)
        outputs = Unroll(head, settings.chunk_entries)(
            seen.features.float(), seen.embeddings.float(), settings.depth, rows.first
        )
        noise = noise_of(sample.seed or 0, sample.drafted + 1, policy.vocabulary)[1:]
        for place, output in enumerate(outputs):
            part = rows.drafted_at(place)
            # tinymath's vocabulary is small: the head has a row for every token.
            scores = head.logits(output[rows.chain(part, place)]).float().numpy()
            scores = scores + noise[place:] if coupled else scores
            ranks[place, place:] = ranks_of(scores, rows.token[part].numpy())
            certainty[place, place:] = lead(scores)
        return Choices(ranks, certainty)
