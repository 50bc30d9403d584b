"""Requests for rollouts, read off a trainer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from paceline import types as t
from paceline.integrations.errors import UnsupportedTrainerError

_NAMES = {field.name for field in fields(t.SamplingParams)} - {"logprobs_mode"}


def check(trainer: Any) -> None:
    """Refuse a trainer that wants what its rollouts cannot do.

    Raises:
        UnsupportedTrainerError: it says what, and what to do.
    """
    if getattr(trainer, "processing_class", None) is None:
        raise UnsupportedTrainerError("the trainer has no tokenizer: give it a processing_class")
    if trainer.args.use_vllm:
        raise UnsupportedTrainerError(
            "use_vllm makes TRL send weights to a vLLM of its own: leave it False. "
            "PacelineGRPOTrainer has the importance sampling correction without it"
        )
    if getattr(trainer, "tools", None):
        raise UnsupportedTrainerError(
            "with tools, TRL itself generates the turns after the first: leave tools and environments out"
        )


def tokenize(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    """Return the token ids of prompts, [prompts][prompt_len], as the trainer itself makes them.

    Raises:
        UnsupportedTrainerError: a prompt has images, or is empty.
    """
    if not prompts:
        return []
    ids, images, multimodal = trainer._tokenize_prompts(prompts)
    if images is not None or any(name != "token_type_ids" for name in multimodal):
        raise UnsupportedTrainerError("prompts with images or other media are not supported, only text")
    found = [[int(token) for token in each] for each in ids]
    if not all(found):
        raise UnsupportedTrainerError("a prompt has no tokens")
    return found


def sampling_of(trainer: Any, mode: t.LogprobsMode) -> t.SamplingParams:
    """Return the sampling parameters that a trainer's configuration asks for.

    Raises:
        UnsupportedTrainerError: `generation_kwargs` has something that is no field of `SamplingParams`.
    """
    given: dict[str, Any] = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": max(trainer.top_k or 0, 0),
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        # The engine's own end of sequence is that of the model's folder, which knows nothing of the tokenizer.
        "stop_token_ids": tuple(trainer.eos_token_ids),
    }
    given.update(trainer.args.generation_kwargs or {})
    unknown = sorted(given.keys() - _NAMES)
    if unknown:
        raise UnsupportedTrainerError(f"generation_kwargs has {', '.join(unknown)}, which is not supported")
    given["stop_token_ids"] = tuple(given["stop_token_ids"])
    return t.SamplingParams(**given, logprobs_mode=mode)
