"""How the drafter learns. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class Targets(enum.StrEnum):
    """What the drafter is taught."""

    POLICY = "policy"
    """The policy's whole distribution, computed by the learner from the policy's weights."""
    TOP_K = "topk"
    """Its most likely tokens alone, renormalised: what log-probabilities stored at generation would give."""


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """Of the head and its updates."""

    depth: int = 5
    """Places unrolled in training and drafted in evaluation: the tokens of a draft."""
    layers: tuple[int, ...] | None = None
    """The policy's layers whose outputs are features, as transformers' hidden_states; None: `default_layers`."""
    draft_vocabulary: int = 32000
    """Most rows of the head's output; a policy with no more tokens than this is drafted for in full."""
    intermediate_size: int | None = None
    """Of the head's feed-forward layer; None: the policy's."""
    lr: float | None = None
    """Of AdamW; None: 0.64 over the hidden size (a layer's best rate falls as its width grows): 1.6e-4 at 4096."""
    betas: tuple[float, float] = (0.9, 0.95)
    """The usual 0.999 would remember policies long gone."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 10
    """Optimizer steps over which the learning rate rises."""
    epochs: int = 1
    """Times that one update goes over its rollouts."""
    batch_tokens: int = 4096
    """Response tokens of an optimizer step, about."""
    micro_tokens: int = 4096
    """Tokens, padding included, in one pass."""
    place_decay: float = 0.8
    """Weight of each place of a draft against the one before it: a later one counts only if those were right."""
    targets: Targets = Targets.POLICY
    top_k: int = 20
    """Of `targets` topk."""
    chunk_entries: int = 1 << 26
    """Entries of a tensor [rows, vocabulary] or [queries, keys] above which it is made piece by piece."""
    device: str = "cpu"
    checkpoint_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """ValueError for what no learner can work with."""
        for name in ("depth", "draft_vocabulary", "epochs", "batch_tokens", "micro_tokens", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.place_decay <= 1:
            raise ValueError(f"place_decay must be in (0, 1], got {self.place_decay}")
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}")


def default_layers(count: int) -> tuple[int, ...]:
    """Three layers of a policy of `count`: one near its bottom, its middle, one near its top.

    Rising, distinct and within 1..count-1, because transformers has the output of the last one normalised; a policy
    of fewer than four layers has fewer. ValueError: a single layer has none.
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
