"""Recorded run as a device's clock needs it: samples by cell, texts that idle time could write, and steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline import SampleKey
from services.generation.config import GenerationConfig

if TYPE_CHECKING:
    from bench.rollout.registry import Regime
    from bench.rollout.training import Trajectory
from collections.abc import Iterator

MOST_FORKS: int = GenerationConfig.model_fields["forks"].default
"""Most forks of a text."""
Tokens = NDArray[np.int32]
Cell = tuple[int, int]
"""Index of a prompt in its step, and slot."""


@dataclass(frozen=True, slots=True)
class ForkedText:
    """A response that takes the runner-up at the near-tie at position `at`."""

    at: int
    margin: float
    """Difference in nats between the token and the runner-up."""
    response: Tokens


@dataclass(frozen=True, slots=True)
class OldText:
    """A response of the previous policy, and its forks at the nearest ties, by ascending margin."""

    response: Tokens
    forks: tuple[ForkedText, ...] = ()


OldTexts = Mapping[SampleKey, OldText]


@dataclass(frozen=True, slots=True)
class RecordedTexts:
    """A step of the run: its prompts, and by cell the seeds, the responses and the previous policy's responses."""

    step: int
    prompt_ids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    seeds: Mapping[Cell, int]
    responses: Mapping[Cell, Tokens]
    before: Mapping[Cell, Tokens]
    """Texts that can be generated ahead: to the same noise as the responses, or to other noise."""
    forks: Mapping[Cell, Sequence[ForkedText]] = field(default_factory=dict)
    """Forks by cell, ordered by ascending margin."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the lengths of the previous policy's texts, [prompts, samples]."""
        slots = 1 + max(slot for _, slot in self.seeds)
        places = range(len(self.prompt_ids))
        return np.array([[len(self.before[place, slot]) for slot in range(slots)] for place in places])


def recorded_texts(
    trajectory: Trajectory, before: Sequence[OldTexts], regime: Regime
) -> tuple[RecordedTexts, ...]:
    """Return the steps of a part of the run by cell, with the previous policy's texts to the same noise."""
    found, most = [], regime.max_tokens
    for step, old in zip(trajectory.steps, before, strict=True):
        cells = {
            (place, slot): SampleKey(group.prompt_id, slot)
            for place, group in enumerate(step.groups)
            for slot in range(group.samples)
        }
        found.append(
            RecordedTexts(
                step=step.step,
                prompt_ids=tuple(group.prompt_id for group in step.groups),
                prompts=tuple(tuple(map(int, group.prompt_token_ids)) for group in step.groups),
                seeds={cell: step.samples[key].seed for cell, key in cells.items()},
                responses={cell: step.samples[key].token_ids.astype(np.int32) for cell, key in cells.items()},
                before={cell: old[key].response[:most] for cell, key in cells.items() if key in old},
                forks={
                    cell: [
                        replace(fork, response=fork.response[:most])
                        for fork in old[key].forks
                        if most is None or fork.at < most
                    ]
                    for cell, key in cells.items()
                    if key in old
                },
            )
        )
    return tuple(found)


def with_other_noise(
    texts: Sequence[RecordedTexts], before: Sequence[OldTexts], regime: Regime
) -> tuple[RecordedTexts, ...] | None:
    """Return the steps with texts of the previous policy to other noise, of slots that the regime leaves out.

    Such a text is an independent sample of the previous policy for the same prompt, and no sample of the step has
    its noise. None if the recording has too few slots.
    """
    found, most = [], regime.max_tokens
    for each, old in zip(texts, before, strict=True):
        slots = 1 + max(slot for _, slot in each.seeds)
        others = {cell: SampleKey(each.prompt_ids[cell[0]], cell[1] + slots) for cell in each.seeds}
        if old and not all(key in old for key in others.values()):
            return None
        drafts = {cell: old[key].response[:most] for cell, key in others.items()} if old else {}
        # Forks are guesses about the sample's own noise.
        found.append(replace(each, before=drafts, forks={}))
    return tuple(found)


def refused_share(texts: Sequence[RecordedTexts]) -> float | None:
    """Return the share of draft tokens that the policy refuses while draft and sample agree so far.

    The drafts are the texts that could be generated ahead, each from its first token to its first refused one. None
    without drafts.
    """
    compared = refused = 0
    for each in texts:
        for cell, draft in each.before.items():
            sample = each.responses[cell]
            both = min(len(draft), len(sample))
            differs = np.flatnonzero(draft[:both] != sample[:both])
            compared += int(differs[0]) + 1 if len(differs) else both
            refused += bool(len(differs))
    return refused / compared if compared else None


@dataclass(frozen=True, slots=True)
class ClockedStep:
    """A step as the device would have run it."""

    step: int
    seconds: float
    tokens: int
    decode_steps: int
    """Sum over all samples."""
    most_decode_steps: int
    drafted: int
    accepted: int
    covered: int | None
    """Tokens that were already generated when the step began; None for an engine that generates nothing ahead."""
    whole: float = 0.0
    """Seconds from the beginning of this step to the beginning of the next one."""


@dataclass(slots=True)
class TrainerClock:
    """Times at which the rollouts of a run may begin.

    A rollout waits for the update on the step before it. With `one_step_off` it waits only for the update on the
    step before that one; its samples are then a version old when the trainer learns from them.
    """

    update: float
    """Seconds of an update."""
    one_step_off: bool = False
    _ready: float = 0.0
    """End of the last update."""

    def next_begin(self, ended: float) -> float:
        """Return the time at which the next rollout begins, after one that ended at `ended`."""
        before, self._ready = self._ready, max(ended, self._ready) + self.update
        return max(ended, before) if self.one_step_off else self._ready


def scheduled(steps: Sequence[ClockedStep], trainer: TrainerClock) -> Iterator[ClockedStep]:
    """Yield steps whose rollouts do not depend on the trainer, with the time from each beginning to the next."""
    begin = 0.0
    for step in steps:
        following = trainer.next_begin(begin + step.seconds)
        yield replace(step, whole=following - begin)
        begin = following
