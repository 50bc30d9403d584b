"""Steps of a run on a device's clock, and the times at which a trainer lets them begin. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


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
