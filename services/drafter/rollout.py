"""What the drafter learns from: a finished sample with its reward. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample, sampled by the policy at temperature 1. Its name is (run_id, batch_id, prompt_id, slot)."""

    run_id: str
    batch_id: str
    prompt_id: str
    slot: int
    """Index of the sample in its group."""
    policy_version: int
    """Of the weights that sampled it."""
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    reward: float | None
    """None: the trainer has reported none."""
    seed: int | None = None
    """Of its noise (64 bit, unsigned); None where it is not known, or where not all tokens come of that noise."""

    @property
    def group(self) -> tuple[str, str, str]:
        """What the samples of one prompt in one batch have in common."""
        return self.run_id, self.batch_id, self.prompt_id

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt + self.response

    @property
    def drafted(self) -> int:
        """Response tokens that a drafter can have had a say in: all but the first, which comes with the prompt."""
        return max(len(self.response) - 1, 0)
