"""Requests for rollouts, read from a TRL trainer: sampling parameters, groups, and the next steps and prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline import types as t
from paceline.integrations import RolloutFailedError, UnsupportedTrainerError
from paceline.prompts import prompt_id_of

_SAMPLING_FIELDS = {field.name for field in fields(t.SamplingParams)} - {"logprobs_mode"}


def check(trainer: Any) -> None:
    """Refuse a trainer with a configuration that rollouts do not support.

    Raises:
        UnsupportedTrainerError: names the setting, and what to do.
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
    """Return the token ids of prompts, [prompts][prompt_len], tokenized by the trainer itself.

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
    """Return the sampling parameters of a trainer's configuration.

    Raises:
        UnsupportedTrainerError: `generation_kwargs` has a name that is not a field of `SamplingParams`.
    """
    given: dict[str, Any] = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": max(trainer.top_k or 0, 0),
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        # The engine takes its end of sequence from the model folder, which may differ from the trainer's tokenizer.
        "stop_token_ids": tuple(trainer.eos_token_ids),
    }
    given.update(trainer.args.generation_kwargs or {})
    unknown = sorted(given.keys() - _SAMPLING_FIELDS)
    if unknown:
        raise UnsupportedTrainerError(f"generation_kwargs has {', '.join(unknown)}, which is not supported")
    given["stop_token_ids"] = tuple(given["stop_token_ids"])
    return t.SamplingParams(**given, logprobs_mode=mode)


@dataclass(frozen=True, slots=True)
class RepeatedPrompts:
    """Prompts of which one that is repeated G times stands for G samples."""

    groups: tuple[t.Group, ...]
    """One group for each distinct prompt, in order of first occurrence."""
    keys: tuple[t.SampleKey, ...]
    """[prompts], key of the sample for each prompt."""


def group_repeated(prompt_ids: Sequence[Sequence[int]], prefix: str = "") -> RepeatedPrompts:
    """Make one group of all prompts with the same tokens, whether or not they are adjacent.

    Args:
        prompt_ids: token ids of each prompt, [prompts][prompt_len].
        prefix: prefix of the prompts' ids. Different prefixes have different seeds and histories.
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
        raise RolloutFailedError(f"{len(missing)} of {len(keys)} samples are missing")
    found = [by_key[key] for key in keys]
    for sample in found:
        if sample.status in (t.SampleStatus.FAILED, t.SampleStatus.ABORTED):
            reason = sample.error or "it was cancelled"
            raise RolloutFailedError(f"sample {sample.prompt_id}/{sample.slot} {sample.status}: {reason}")
        if not len(sample.token_ids):
            raise RolloutFailedError(f"sample {sample.prompt_id}/{sample.slot} has no tokens")
    return found


@dataclass(frozen=True, slots=True)
class Cadence:
    """Micro-batches between two rollouts, and between two updates of the weights."""

    rollout_every: int
    update_every: int

    def step(self, global_step: int, nth: int) -> int:
        """Return the index of a rollout: the `nth`, from 0, after `global_step` updates.

        It depends on nothing else, so a trainer that resumes from a checkpoint has the same steps as without the
        interruption.
        """
        return -(-global_step * self.update_every // self.rollout_every) + nth

    def updates_before(self, step: int) -> int:
        """Return the number of updates before a rollout."""
        return step * self.rollout_every // self.update_every


def cadence_of(trainer: Any) -> Cadence:
    """Return the cadence of a trainer's configuration."""
    args = trainer.args
    return Cadence(args.steps_per_generation * trainer.num_iterations, args.gradient_accumulation_steps)


class Lookahead:
    """Reader of the batch after the present one, from a repetition of the data loader's order."""

    def __init__(self, batches: Iterator[Sequence[int]], window: int) -> None:
        """Read `batches`, indices of the data set, [prompts] each; search at most `window` of them at a time."""
        self._batches = batches
        self._window = window
        self._next: Sequence[int] | None = next(batches, None)

    def after(self, is_present: Callable[[Sequence[int]], bool]) -> Sequence[int] | None:
        """Return the batch after the present one; None if that is not found, and from then on."""
        for _ in range(self._window):
            if self._next is None:
                break
            present, self._next = self._next, next(self._batches, None)
            if is_present(present):
                return self._next
        self._next = None
        return None


def lookahead_of(trainer: Any) -> Lookahead:
    """Return a reader that repeats the order of the trainer's data loader: TRL's sampler with the same seed."""
    data = trainer.train_dataset
    size = trainer.args.generation_batch_size // trainer.num_generations
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) < size:
        return Lookahead(iter(()), 0)
    from trl.trainer.utils import RepeatSampler

    sampler = RepeatSampler(
        data_source=data,
        mini_repeat_count=1,
        batch_size=size,
        shuffle=trainer.shuffle_dataset,
        seed=trainer.args.seed,
    )

    def batches() -> Iterator[Sequence[int]]:
        while True:
            indices = list(sampler)
            yield from (indices[first : first + size] for first in range(0, len(indices), size))

    return Lookahead(batches(), 2 * (len(data) // size))


def prompts_of(trainer: Any, batch: Sequence[int]) -> list[list[int]]:
    """Return the tokenized prompts of a batch of indices of the data set."""
    data = trainer.train_dataset
    return tokenize(trainer, [data[index]["prompt"] for index in batch])
