"""Learning on several devices: each rank takes its share of every step, and gradients are summed over ranks.

All ranks are given the same rollouts and hold the same weights, so they agree on every decision without asking. A
learner in a process without torch.distributed is the only rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn

T = TypeVar("T")


def count() -> int:
    """How many ranks there are."""
    return distributed.get_world_size() if _is_on() else 1


def own(items: Sequence[T]) -> list[T]:
    """This rank's share."""
    return list(items[distributed.get_rank() :: count()]) if _is_on() else list(items)


def sum_over(values: Tensor) -> Tensor:
    """The sum of the ranks' values, on every rank."""
    if _is_on():
        distributed.all_reduce(values)
    return values


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes each gradient the sum of all ranks'; a rank without one counts as zeros."""
    if not _is_on():
        return
    learned = list(parameters)
    flat = torch.cat(
        [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in learned]
    )
    distributed.all_reduce(flat)
    for each, part in zip(learned, flat.split([each.numel() for each in learned]), strict=True):
        each.grad = part.view_as(each).clone()


def _is_on() -> bool:
    return distributed.is_available() and distributed.is_initialized()
