"""Requests for rollouts, read from a TRL trainer: sampling, groups, and the steps and prompts to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline import types as t
from paceline.integrations.errors import RolloutFailedError, UnsupportedTrainerError
from paceline.prompts import prompt_id_of

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


@dataclass(frozen=True, slots=True)
class RepeatedPrompts:
    """Prompts, in which one that is repeated G times stands for G samples."""

    groups: tuple[t.Group, ...]
    """One for each different prompt, in the order in which they first come."""
    keys: tuple[t.SampleKey, ...]
    """[prompts], the sample that answers each."""


def group_repeated(prompt_ids: Sequence[Sequence[int]], prefix: str = "") -> RepeatedPrompts:
    """Make one group of all prompts with the same tokens, wherever they stand.

    Args:
        prompt_ids: token ids of each prompt, [prompts][prompt_len].
        prefix: beginning of the prompts' ids. Other prefixes give other seeds and histories.
    """
    slots: Counter[str] = Counter()
    tokens: dict[str, Sequence[int]] = {}
    keys = []
    for ids in prompt_ids:
        name = prefix + prompt_id_of(ids)
        tokens.setdefault(name, ids)
        keys.append(t.SampleKey(name, slots[name]))
        slots[name] += 1
    return RepeatedPrompts(tuple(t.Group(name, tokens[name], slots[name]) for name in tokens), tuple(keys))


def in_order(keys: Sequence[t.SampleKey], samples: Iterable[t.Sample]) -> list[t.Sample]:
    """Return the samples in the order of their keys.

    Raises:
        RolloutFailedError: one is missing, has failed, was cancelled or has no tokens.
    """
    by_key = {sample.key: sample for sample in samples}
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise RolloutFailedError(f"{len(missing)} of {len(keys)} samples did not come")
    found = [by_key[key] for key in keys]
    for sample in found:
        if sample.status in (t.SampleStatus.FAILED, t.SampleStatus.ABORTED):
            told = sample.error or "it was cancelled"
            raise RolloutFailedError(f"sample {sample.prompt_id}/{sample.slot} {sample.status}: {told}")
        if not len(sample.token_ids):
            raise RolloutFailedError(f"sample {sample.prompt_id}/{sample.slot} has no tokens")
    return found


@dataclass(frozen=True, slots=True)
class Cadence:
    """Micro-batches between two rollouts, and between two updates of the weights."""

    rollout_every: int
    update_every: int

    def step(self, global_step: int, nth: int) -> int:
        """Return the index of a rollout: the nth one, from 0, after `global_step` updates.

        It depends on nothing else, so that a trainer that goes on from a checkpoint has the steps that it would
        have had.
        """
        return -(-global_step * self.update_every // self.rollout_every) + nth

    def updates_before(self, step: int) -> int:
        """Return how many updates come before a rollout."""
        return step * self.rollout_every // self.update_every


class Lookahead:
    """The batch after the present one, read from a repetition of the data loader's order."""

    def __init__(self, batches: Iterator[Sequence[int]], window: int) -> None:
        """`batches` are indices of the data set, [prompts] each; of these `window` are searched for a batch."""
        self._batches = batches
        self._window = window
        self._next: Sequence[int] | None = next(batches, None)

    def after(self, is_present: Callable[[Sequence[int]], bool]) -> Sequence[int] | None:
        """Return the batch after the present one, or None once that is not found, and from then on."""
        for _ in range(self._window):
            if self._next is None:
                break
            present, self._next = self._next, next(self._batches, None)
            if is_present(present):
                return self._next
        self._next = None
        return None
