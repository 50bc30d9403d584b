"""Responses of an earlier policy with the noise of samples: what an idle instance would have generated ahead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from bench.training import TrainedStep
from examples.tinymath.train import Options
from kernels.coupled_sampler.sample import sample
from paceline import SampleKey

Tokens = list[int]


class EarlierPolicy:
    """A policy by itself, without an engine; its responses are those of an engine up to near-ties."""

    def __init__(self, weights: Path) -> None:
        torch.set_num_threads(1)
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()

    def responses(self, step: TrainedStep, options: Options) -> dict[SampleKey, Tokens]:
        """Return its responses to the samples of a step, with their seeds."""
        found: dict[SampleKey, Tokens] = {}
        for group in step.groups:
            keys = [key for key in step.samples if key.prompt_id == group.prompt_id]
            seeds = [step.samples[key].seed for key in keys]
            prompt = [int(each) for each in group.prompt_token_ids]
            found |= zip(keys, self.draw(prompt, seeds, options.temperature, options.max_tokens), strict=True)
        return found

    @torch.inference_mode()
    def draw(
        self, prompt: Sequence[int], seeds: Sequence[int], temperature: float, longest: int
    ) -> list[Tokens]:
        """Return a response for each seed, up to its end token or `longest` tokens."""
        end = self._model.config.eos_token_id
        found: list[Tokens] = [[] for _ in seeds]
        live = list(range(len(seeds)))
        # The sampler reads int64 as unsigned.
        noise = torch.from_numpy(np.array(seeds, np.uint64).astype(np.int64))
        cache, ids = DynamicCache(), torch.tensor([list(prompt)] * len(seeds))
        while live:
            logits = self._model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
            count, position = len(live), len(found[live[0]])
            drawn = sample(
                logits.contiguous(),
                noise[live],
                torch.full((count,), position),
                torch.full((count,), temperature),
                torch.empty(0, dtype=torch.int64),
                torch.arange(count + 1),
            ).tokens.tolist()
            for place, token in zip(live, drawn, strict=True):
                found[place].append(token)
            kept = [i for i, token in enumerate(drawn) if token != end and position + 1 < longest]
            if len(kept) < count:
                cache.batch_select_indices(torch.tensor(kept, dtype=torch.int64))
            live = [live[i] for i in kept]
            ids = torch.tensor([[drawn[i]] for i in kept])
        return found
