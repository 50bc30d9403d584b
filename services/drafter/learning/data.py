"""Plain data that the training process exchanges with the service: samples in, reports out. Without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One finished sample with its reward, sampled by the policy at temperature 1.

    (run_id, batch_id, prompt_id, slot) identifies it.
    """

    run_id: str
    batch_id: str
    prompt_id: str
    slot: int
    """Index of the sample in its group."""
    policy_version: int
    """Version of the weights that sampled it."""
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    reward: float | None
    """None if the trainer has reported none."""
    seed: int | None = None
    """Seed of its noise (64 bit, unsigned); None if unknown or if it does not determine every token."""
    entries: tuple[str, ...] = ()
    """Entries of the feed that the sample and its reward arrived in."""

    @property
    def group(self) -> tuple[str, str, str]:
        """Identifier shared by the samples of one prompt in one batch."""
        return self.run_id, self.batch_id, self.prompt_id

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt + self.response

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    @property
    def drafted(self) -> int:
        """Number of response tokens that can be drafted: all but the first, which the prefill samples."""
        return max(len(self.response) - 1, 0)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Report of one update; losses are those before each optimizer step."""

    kd_loss: float
    """KL(policy || drafter) in nats, unweighted mean over rows and draft positions; NaN without any."""
    by_place: tuple[float, ...]
    """The same for each draft position."""
    samples: int
    tokens: int
    """Response tokens learned from, each counted once."""
    left_out: int
    """Samples that could not be used: too short to draft for, or too long for the model."""
    steps: int
    """Optimizer steps taken."""
    skipped: int
    """Steps not taken because a loss or gradient was not finite; they changed neither weights nor optimizer."""
    gradient_norm: float
    """Gradient norm of the last step taken, before clipping."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of replaying one drafter on some samples."""

    acceptance_length: float
    """Tokens per verification, the target's own included: in [1, depth + 1]; 0 without any verification."""
    by_place: tuple[float, ...]
    """Acceptance rate of each draft position, given that all before it were accepted."""
    kd_loss: float
    """KL(policy || drafter) in nats, mean over all positions of all drafts that could start anywhere."""
    samples: int
    tokens: int
    """Response tokens that could be drafted."""
    verifications: float
    accepted: float
    """Draft tokens that verification would have kept."""
    with_seed: int
    """Samples drafted for with their own noise; the others are expectations."""
