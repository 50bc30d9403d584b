"""Settings of training. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


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
    """Betas of AdamW. The usual 0.999 would average over policies long gone."""
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
    """Weight of each draft position relative to the one before it, on whose acceptance it depends."""
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
