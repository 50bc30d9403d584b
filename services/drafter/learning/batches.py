"""Rollouts as tensors, in passes that hold a bounded number of tokens.

A drafter has a say in all tokens of a response but its first, which comes with the prompt. A pass numbers those of
all its rollouts one after another: its *rows*. Row i of a rollout with n response tokens, 0 <= i < n - 1, is about
response token i + 1, and the policy's distribution of it stands behind position prompt + i. Place k of a draft that
starts behind position prompt - 1 + j is about row j + k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.drafter.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Pass:
    """Some rollouts, each of at least two response tokens.

    tokens [B, L]; the rest [rows]: `rollout` its place in the pass, `offset` i above, `behind` the position
    whose distribution it is, `token` what was sampled. `first`: the earliest position with a draft behind it.
    """

    tokens: Tensor
    rollout: Tensor
    offset: Tensor
    behind: Tensor
    token: Tensor
    first: int

    def __len__(self) -> int:
        """Its rows."""
        return len(self.offset)

    def drafted_at(self, place: int) -> Tensor:
        """The rows that place `place` of some draft is about, [n]: a draft starts `place` rows before each."""
        return (self.offset >= place).nonzero().squeeze(1)

    def chain(self, rows: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Where `Unroll` puts place `place` of rows [n]: indices into the first two axes of its outputs."""
        return self.rollout[rows], self.behind[rows] - 1 - place - self.first


def make_pass(rollouts: Sequence[Rollout], device: torch.device) -> Pass:
    """The tensors of rollouts, on `device`."""
    lengths = [len(rollout.prompt) + len(rollout.response) for rollout in rollouts]
    tokens = torch.zeros(len(rollouts), max(lengths), dtype=torch.int64)
    for line, rollout, length in zip(tokens, rollouts, lengths, strict=True):
        line[:length] = torch.tensor(rollout.tokens)
    counts = torch.tensor([rollout.drafted for rollout in rollouts])
    owner = torch.repeat_interleave(torch.arange(len(rollouts)), counts)
    offset = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    behind = torch.tensor([len(rollout.prompt) for rollout in rollouts])[owner] + offset
    token = tokens[owner, behind + 1]
    first = min(len(rollout.prompt) for rollout in rollouts) - 1
    return Pass(
        tokens.to(device), owner.to(device), offset.to(device), behind.to(device), token.to(device), first
    )


def passes(rollouts: Sequence[Rollout], tokens: int) -> Iterator[list[int]]:
    """Places of rollouts of like length, shortest first, at most `tokens` with padding in each list (or one)."""
    lengths = [len(rollout.prompt) + len(rollout.response) for rollout in rollouts]
    found: list[int] = []
    for place in sorted(range(len(rollouts)), key=lengths.__getitem__):
        if found and (len(found) + 1) * lengths[place] > tokens:
            yield found
            found = []
        found.append(place)
    if found:
        yield found


def steps(rollouts: Sequence[Rollout], tokens: int) -> list[list[int]]:
    """Places of the rollouts of each optimizer step, in order: about `tokens` drafted ones each, evenly."""
    total = sum(rollout.drafted for rollout in rollouts)
    count = min(max(round(total / tokens), 1), max(len(rollouts), 1))
    found: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for place, rollout in enumerate(rollouts):
        # By the middle of the rollout, so that a long one does not open a step of its own.
        middle = before + rollout.drafted / 2
        found[min(int(middle * count / max(total, 1)), count - 1)].append(place)
        before += rollout.drafted
    return [each for each in found if each]
