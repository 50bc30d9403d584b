"""Prompts and rollouts to index: made-up texts of repeated phrases, and rollouts of the tinymath model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
MODEL = Path("examples/tinymath/model")
PROMPTS, ROLLOUTS, LENGTH, PROMPT_LENGTH = 1000, 4, 250, 100
VOCABULARY, PHRASES = 32_000, 5000
RUNNING, RUNNING_PROMPTS = 64, 8


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A prompt and rollouts of it."""

    prompt: Tokens
    rollouts: list[Tokens]


def made_up_groups(prompts: int = PROMPTS, seed: int = 0) -> list[RunningGroup]:
    """Make texts that repeat phrases: some that all prompts share, some of the prompt, in an order that it prefers.

    The first prompts have further rollouts for the samples that run.
    """
    rng = np.random.default_rng(seed)
    likely = np.cumsum(1 / np.arange(1, VOCABULARY + 1))

    def words(count: int) -> Tokens:
        return np.searchsorted(likely, rng.random(count) * likely[-1]).astype(np.int32)

    shared = [words(int(rng.integers(2, 12))) for _ in range(PHRASES)]

    def rollout(own: list[Tokens], following: NDArray[np.int64]) -> Tokens:
        parts, length, at = [], 0, int(rng.integers(len(own)))
        while length < LENGTH:
            # One phrase of seven is new.
            parts.append(words(int(rng.integers(1, 6))) if rng.random() < 0.15 else own[at])
            length += len(parts[-1])
            at = int(following[at, rng.choice(3, p=(0.6, 0.3, 0.1))])
        return np.concatenate(parts)[:LENGTH]

    groups = []
    for prompt in range(prompts):
        count = ROLLOUTS + (RUNNING // RUNNING_PROMPTS if prompt < RUNNING_PROMPTS else 0)
        own = [shared[i] for i in rng.integers(0, PHRASES, 30)]
        own += [words(int(rng.integers(2, 12))) for _ in range(30)]
        following = rng.integers(0, len(own), (len(own), 3))
        groups.append(RunningGroup(words(PROMPT_LENGTH), [rollout(own, following) for _ in range(count)]))
    return groups


def tinymath_groups(prompts: int = 24, rollouts: int = 16, seed: int = 0) -> list[RunningGroup]:
    """Make rollouts of the tinymath model at temperature 1, of problems as in training, here on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from examples.tinymath import tokenizer
    from examples.tinymath.tasks import MAX_TRACE, PRACTICE, make_problems

    # So small a model gains nothing from more threads, and they would wait for each other on a busy machine.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    groups = []
    for problem in make_problems(seed + 1, prompts, PRACTICE):
        ids = tokenizer.prompt_ids(problem.question)
        batch = torch.tensor([ids] * rollouts)
        with torch.no_grad():
            texts = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_TRACE,
                eos_token_id=tokenizer.EOS_ID,
                pad_token_id=tokenizer.PAD_ID,
            )
        responses = [until_end(text[len(ids) :], tokenizer.EOS_ID) for text in texts.numpy()]
        groups.append(RunningGroup(np.array(ids, np.int32), responses))
    return groups


def until_end(tokens: NDArray[Any], end: int) -> Tokens:
    """Return a response with its end token, without what pads it."""
    ends = np.flatnonzero(tokens == end)
    return tokens[: ends[0] + 1 if len(ends) else len(tokens)].astype(np.int32)
