"""Groups of repeated prompts, and their samples in the order of the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline import types as t
from paceline.integrations.errors import RolloutFailedError
from paceline.integrations.prompts import prompt_id_of


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
