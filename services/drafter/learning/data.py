"""Settings, samples with their weights, and reports: data that service and training process exchange. No torch."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard


class Targets(enum.StrEnum):
    """Targets of distillation."""

    POLICY = "policy"
    """The whole distribution of the policy, computed by the learner with the policy's weights."""
    TOP_K = "topk"
    """Its most likely tokens, renormalised: the information in log-probabilities stored at generation."""


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """Settings of the head and its updates."""

    depth: int = 5
    """Draft length in training and evaluation."""
    layers: tuple[int, ...] | None = None
    """Layers of the policy whose outputs are features, numbered as hidden_states; None: `default_layers`."""
    draft_vocabulary: int = 32000
    """Most rows of the head's output; a smaller vocabulary of the policy is covered completely."""
    intermediate_size: int | None = None
    """Size of the head's feed-forward layer; None: the policy's."""
    lr: float | None = None
    """Learning rate of AdamW; None: 0.64 / hidden size (the best rate falls with width), 1.6e-4 at 4096."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW. The usual 0.999 would average over policies of many updates ago."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 10
    """Optimizer steps over which the learning rate rises."""
    epochs: int = 1
    """Passes of one update over its samples."""
    batch_tokens: int = 4096
    """Approximate response tokens of an optimizer step."""
    micro_tokens: int = 4096
    """Most tokens, padding included, of one forward pass."""
    place_decay: float = 0.8
    """Weight of each draft position relative to the previous one, on whose acceptance it depends."""
    acceptance_share: float = 0.8
    """Share of the probability of rejection in the loss; the rest is divergence."""
    targets: Targets = Targets.POLICY
    top_k: int = 20
    """Number of tokens with `targets` topk."""
    chunk_entries: int = 1 << 26
    """Most entries of a tensor [rows, vocabulary] or [queries, keys]; larger ones are computed in chunks."""
    device: str = "cpu"
    checkpoint_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values. ValueError: one of them is out of range."""
        for name in ("depth", "draft_vocabulary", "epochs", "batch_tokens", "micro_tokens", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.acceptance_share <= 1:
            raise ValueError(f"acceptance_share must be in [0, 1], got {self.acceptance_share}")
        if not 0 < self.place_decay <= 1:
            raise ValueError(f"place_decay must be in (0, 1], got {self.place_decay}")
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}")


def default_layers(count: int) -> tuple[int, ...]:
    """Choose three layers of a policy of `count`: near its bottom, in the middle, and near its top.

    They are ascending, distinct and in 1..count-1, because transformers normalises the output of the last layer. A
    policy of fewer than four layers has fewer. ValueError: a single layer has none.
    """
    if count < 2:
        raise ValueError(f"a policy of {count} layers has no layer between its first and its last")
    highest = count - 1
    found: list[int] = []
    for layer in sorted(min(max(each, 1), highest) for each in (2, count // 2, count - 3)):
        free = [each for each in range(1, count) if each not in found]
        if free:
            found.append(min(free, key=lambda each: (abs(each - layer), -each)))
    return tuple(sorted(found))


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
    """Feed entries in which the sample and its reward arrived."""

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
    """Report of one update; losses are measured before each optimizer step."""

    kd_loss: float
    """KL(policy || drafter) in nats, unweighted mean over rows and draft positions; NaN without any."""
    by_place: tuple[float, ...]
    """`kd_loss` of each draft position."""
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


LOWEST, HIGHEST = 0.1, 4.0
"""Bounds of weights before the division by their mean, which keeps their ratio of at most 40."""
_SAME = 1e-6
"""Rewards of a group are equal if their standard deviation is below this share of the largest."""


class Weighting(enum.StrEnum):
    """Weights of samples in distillation: w(r) > 0 as a function of the reward (ReSpec, section 5.3.1).

    The paper's default is w(r) = r, "in practice we normalize and clip". Here weights are clipped to [LOWEST,
    HIGHEST] and then divided by their mean over the samples of an update: neither loss nor learning rate depends on
    the scale of rewards, a wrong answer still teaches the behaviour of the policy, and one sample cannot dominate
    the gradient.

    - REWARD: w = r / mean r. Rewards below 0 count as 0.
    - GROUP: relative to the samples of the same prompt, w = 1 + (r - mean) / std of its group: samples that GRPO
      reinforces count more, however hard their prompt is. A group of equal rewards has weight 1.
    - NONE: w = 1, plain distillation ("no-reward KD").

    A sample without a finite reward has weight 1 before the division. If rewards do not distinguish samples (all
    equal, all 0, or none known), all weights are 1.
    """

    REWARD = "reward"
    GROUP = "group"
    NONE = "none"

    @property
    def needs_rewards(self) -> bool:
        """Return True if the weight of a sample depends on its reward."""
        return self is not Weighting.NONE


def weights_of(rollouts: Sequence[TrainingSample], weighting: Weighting) -> list[float]:
    """Return w(r) of each sample, in order."""
    return weigh([rollout.reward for rollout in rollouts], [rollout.group for rollout in rollouts], weighting)


def weigh(rewards: Sequence[float | None], groups: Sequence[Hashable], weighting: Weighting) -> list[float]:
    """Return a weight for each reward: positive, finite, of mean 1.

    Args:
        rewards: rewards of any scale; None or not finite for unknown ones.
        groups: group of each reward, within which GROUP compares.

    Raises:
        ValueError: not as many groups as rewards.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards, but {len(groups)} groups")
    if weighting is Weighting.NONE:
        return [1.0] * len(rewards)
    raw = _relative(rewards, groups) if weighting is Weighting.GROUP else _proportional(rewards)
    clipped = [min(max(weight, LOWEST), HIGHEST) for weight in raw]
    mean = sum(clipped) / max(len(clipped), 1)
    return [weight / mean for weight in clipped]


def _proportional(rewards: Sequence[float | None]) -> list[float]:
    """Return r / mean r over the known rewards; 1 if there is none above 0."""
    known = [max(reward, 0.0) for reward in rewards if _is_known(reward)]
    highest = max(known, default=0.0)
    if highest <= 0:
        return [1.0] * len(rewards)
    # As shares of the highest, since a sum of huge rewards would overflow.
    mean = sum(reward / highest for reward in known) / len(known)
    return [max(reward, 0.0) / highest / mean if _is_known(reward) else 1.0 for reward in rewards]


def _relative(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> list[float]:
    """Return 1 + (reward - mean) / standard deviation, within each group."""
    members: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for place, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if _is_known(reward):
            members[group].append((place, reward))
    weights = [1.0] * len(rewards)
    for known in members.values():
        scale = max(abs(reward) for _, reward in known)
        if scale == 0:
            continue
        shares = [reward / scale for _, reward in known]
        mean = math.fsum(shares) / len(shares)
        std = math.sqrt(math.fsum((share - mean) ** 2 for share in shares) / len(shares))
        if std > _SAME:
            for (place, _), share in zip(known, shares, strict=True):
                weights[place] = 1.0 + (share - mean) / std
    return weights


def _is_known(reward: float | None) -> TypeGuard[float]:
    return reward is not None and math.isfinite(reward)
