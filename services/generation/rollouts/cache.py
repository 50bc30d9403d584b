"""The rollouts that an instance has at hand. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.drafts.rollout import Kind, Rollout
from services.generation.rollouts.origin import Origin, PromptKey

ROLLOUT_OVERHEAD = 512
"""Bytes charged for a rollout beside its arrays."""
PROMPT_OVERHEAD = 512
"""Bytes charged for a prompt, rollouts or not."""

Shards = Mapping[PromptKey, tuple[int | None, Sequence[Rollout]]]
"""What the store has of some prompts: for each, the step that it was asked for, and all rollouts. None instead of
the step: there may be more, which did not arrive."""

_Name = tuple[int, Kind, int | None]


@dataclass(slots=True)
class _Prompt:
    """Rollouts of a prompt by slot, kind and, for HISTORY, version."""

    rollouts: dict[_Name, Rollout] = field(default_factory=dict)
    # The step for which the store was asked last; None: never.
    fetched_for: int | None = None


class DraftCache:
    """Rollouts by prompt, bounded in bytes; the prompt that was used least recently goes first.

    Belongs to the engine thread. `fetched_for` may be asked from another: it only looks.
    """

    def __init__(self, vocab_size: int, budget_bytes: int) -> None:
        """Rollouts with tokens outside of `vocab_size` are of another model, and not taken."""
        self._vocab_size = vocab_size
        self._budget = budget_bytes
        self._prompts: OrderedDict[PromptKey, _Prompt] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        """Prompts that are known."""
        return len(self._prompts)

    def fetched_for(self, prompt: PromptKey) -> int | None:
        """The step for which the rollouts of a prompt were last fetched; None when they are not here."""
        known = self._prompts.get(prompt)
        return None if known is None else known.fetched_for

    def add(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Take rollouts in; the ones that bring new tokens.

        History takes the place of the same version's, a pre-generated rollout that of an earlier step or of a
        shorter one. What is not sound is left out.
        """
        taken = [rollout for rollout in rollouts if self._is_sound(rollout) and self._add(rollout)]
        self._shrink()
        return taken

    def add_shards(self, shards: Shards) -> list[Rollout]:
        """Take in all that the store has of some prompts.

        What is not among them and of no use any more is forgotten, if they are all: history, and what was
        pre-generated for an earlier step. Returns all that is sound, new here or not.
        """
        sound: list[Rollout] = []
        for key, (step, rollouts) in shards.items():
            prompt = self._prompt(key)
            if step is not None:
                self._forget_others(prompt, {_name(rollout) for rollout in rollouts}, step)
            taken = [rollout for rollout in rollouts if self._is_sound(rollout)]
            for rollout in taken:
                self._add(rollout)
            sound += taken
        self._shrink()
        return sound

    def same_seed(self, origin: Origin, seed: int) -> Rollout | None:
        """The longest rollout that was made with a sample's own noise; of equal ones the newest."""
        found = [each for each in self.all(origin.prompt) if each.seed == seed and each.slot == origin.slot]
        return max(found, key=lambda rollout: (len(rollout.tokens), rollout.version), default=None)

    def of_slot(self, origin: Origin, delay: int = 0) -> Rollout | None:
        """The history of a sample's slot: the newest version, or the `delay`-th before it; None: not that many."""
        return _older([each for each in self.all(origin.prompt) if each.slot == origin.slot], delay)

    def group(self, origin: Origin, delay: int = 0) -> list[Rollout]:
        """`of_slot` for every slot of a sample's group."""
        slots: dict[int, list[Rollout]] = {}
        for rollout in self.all(origin.prompt):
            slots.setdefault(rollout.slot, []).append(rollout)
        found = (_older(rollouts, delay) for rollouts in slots.values())
        return [rollout for rollout in found if rollout is not None]

    def all(self, prompt: PromptKey | None) -> list[Rollout]:
        """Every rollout of a prompt."""
        known = None if prompt is None else self._prompts.get(prompt)
        if prompt is None or known is None:
            return []
        self._prompts.move_to_end(prompt)
        return list(known.rollouts.values())

    def _is_sound(self, rollout: Rollout) -> bool:
        named = rollout.run_id and rollout.prompt_id and len(rollout.tokens)
        whole = len(rollout.logprobs) in (0, len(rollout.tokens))
        return bool(named and whole and int(rollout.tokens.max()) < self._vocab_size)

    def _forget_others(self, prompt: _Prompt, names: set[_Name], step: int) -> None:
        """The store has these for a step, and no others."""
        for name, rollout in list(prompt.rollouts.items()):
            if name not in names and (rollout.kind is Kind.HISTORY or rollout.step < step):
                self._drop(prompt, name)
        prompt.fetched_for = step

    def _add(self, rollout: Rollout) -> bool:
        prompt = self._prompt((rollout.run_id, rollout.prompt_id))
        name = _name(rollout)
        known = prompt.rollouts.get(name)
        if known is not None:
            if rollout.kind is Kind.PREGENERATED and _rank(known) >= _rank(rollout):
                return False
            self._drop(prompt, name)
        prompt.rollouts[name] = rollout
        self.nbytes += rollout.nbytes + ROLLOUT_OVERHEAD
        return known is None or not np.array_equal(known.tokens, rollout.tokens)

    def _drop(self, prompt: _Prompt, name: _Name) -> None:
        self.nbytes -= prompt.rollouts.pop(name).nbytes + ROLLOUT_OVERHEAD

    def _prompt(self, key: PromptKey) -> _Prompt:
        known = self._prompts.get(key)
        if known is None:
            known = self._prompts[key] = _Prompt()
            self.nbytes += PROMPT_OVERHEAD
        self._prompts.move_to_end(key)
        return known

    def _shrink(self) -> None:
        while self.nbytes > self._budget:
            _, prompt = self._prompts.popitem(last=False)
            for name in list(prompt.rollouts):
                self._drop(prompt, name)
            self.nbytes -= PROMPT_OVERHEAD


def _name(rollout: Rollout) -> _Name:
    return (rollout.slot, rollout.kind, rollout.version if rollout.kind is Kind.HISTORY else None)


def _rank(rollout: Rollout) -> tuple[int, int, int]:
    """A later step is of more use, then a longer text, then a newer policy."""
    return (rollout.step, len(rollout.tokens), rollout.version)


def _older(rollouts: Sequence[Rollout], delay: int) -> Rollout | None:
    history = [rollout for rollout in rollouts if rollout.kind is Kind.HISTORY]
    history.sort(key=lambda rollout: rollout.version, reverse=True)
    return history[delay] if delay < len(history) else None
