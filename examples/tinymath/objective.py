"""The mathematics of GRPO without a model: advantages, the clipped loss, and the penalty for drift."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], eps: float = 1e-4) -> list[float]:
    """Return (reward - mean) / deviation within each group; 0 if all rewards of the group are equal."""
    members: dict[Hashable, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    mean = {group: sum(found) / len(found) for group, found in members.items()}
    std = {g: (sum((r - mean[g]) ** 2 for r in found) / len(found)) ** 0.5 for g, found in members.items()}
    return [
        (reward - mean[group]) / (std[group] + eps) if std[group] > eps else 0.0
        for reward, group in zip(rewards, groups, strict=True)
    ]


def policy_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return the clipped loss of each token, all shapes [tokens]: -min(ratio * A, clip(ratio) * A)."""
    ratio = (logprobs - behaviour).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def kl_penalty(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the divergence from the reference for each token, never negative: e^d - d - 1."""
    return (reference - logprobs).exp() - (reference - logprobs) - 1


def sum_of_means(losses: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean of each sample's losses, summed: `losses` is [sum of lengths], one sample after another."""
    weights = [1 / length for length in lengths for _ in range(length)]
    return (losses * torch.tensor(weights)).sum()


def micro_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Divide rows into batches of similar length with at most `tokens` tokens including padding.

    Yields the indices of the rows of each batch, the shortest rows first.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[place] > tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
