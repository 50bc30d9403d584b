"""The rollouts of a run: which ones are read, when they are acknowledged, and the figures of their samples."""

from __future__ import annotations

from paceline.rollout import AsyncRollout
from paceline.step_stats import StepStats

# Rollouts of earlier steps that are still read; of more, the newest.
_KEPT_ROLLOUTS = 8
# Steps whose figures are kept.
_KEPT_STEPS = 8


class RunRollouts:
    """Rollouts that are not acknowledged, of the newest step and of earlier ones that are still read."""

    def __init__(self) -> None:
        self._rollouts: list[AsyncRollout] = []
        self._stats: dict[int, list[StepStats]] = {}
        """Figures of the rollouts of each step, those of the newest step last."""

    def add(self, rollout: AsyncRollout) -> None:
        """Take a rollout that was submitted, and acknowledge what was read to its end of earlier steps."""
        step = rollout.batch.step
        self.acknowledge(step)
        self._rollouts.append(rollout)
        self._stats[step] = [*self._stats.pop(step, []), rollout.step_stats]
        while len(self._stats) > _KEPT_STEPS:
            del self._stats[next(iter(self._stats))]

    def acknowledge(self, before: float) -> None:
        """Acknowledge in the background what was read to its end of steps before this one."""
        done = [each for each in self._rollouts if each.batch.step < before and each.complete]
        for rollout in done:
            rollout.post_ack()
        left = [each for each in self._rollouts if each.batch.step < before and not each.complete]
        # Those that were left in the middle are not kept without end.
        gone = [*done, *left[:-_KEPT_ROLLOUTS]]
        self._rollouts = [each for each in self._rollouts if each not in gone]

    def find(self, batch_id: str) -> AsyncRollout | None:
        """Return the rollout of a batch; None if it is not kept."""
        return next((each for each in self._rollouts if each.batch.batch_id == batch_id), None)

    def stats(self, step: int) -> dict[str, float]:
        """Return the figures of the samples of a step that were read; ValueError if none is known."""
        if step not in self._stats:
            known = ", ".join(map(str, self._stats)) or "none"
            raise ValueError(
                f"step {step}: this run has asked for no samples of it lately; it has of {known}"
            )
        return StepStats.joined(self._stats[step]).figures()

    def clear(self) -> None:
        """Forget the rollouts."""
        self._rollouts.clear()
