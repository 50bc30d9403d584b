"""Batches of samples as tensors, in passes of a bounded number of tokens.

A drafter can draft all tokens of a response but the first, which the prefill samples. A pass numbers those
tokens of all its samples consecutively: its *rows*. Row i of a sample with n response tokens, 0 <= i < n - 1,
stands for response token i + 1, whose distribution is the policy's output at position prompt + i. Draft
position k of a draft that starts after position prompt - 1 + j predicts row j + k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.drafter.learning.data import TrainingSample


@dataclass(frozen=True, slots=True)
class Pass:
    """Tensors of some samples, each of at least two response tokens.

    tokens has shape [B, L], the others [rows]: `rollout` is the index of the sample in the pass, `offset` the i
    above, `behind` the position whose output is the distribution, and `token` the sampled token. `first` is the
    earliest position after which a draft starts.
    """

    tokens: Tensor
    rollout: Tensor
    offset: Tensor
    behind: Tensor
    token: Tensor
    first: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offset)

    def drafted_at(self, place: int) -> Tensor:
        """Return the rows that some draft predicts at position `place`, [n]: it starts `place` rows before each."""
        return (self.offset >= place).nonzero().squeeze(1)

    def chain(self, rows: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Return the indices into the first two axes of `Unroll`'s output of position `place`, for rows [n]."""
        return self.rollout[rows], self.behind[rows] - 1 - place - self.first


def make_pass(rollouts: Sequence[TrainingSample], device: torch.device) -> Pass:
    """Return the tensors of samples, on `device`."""
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


def passes(rollouts: Sequence[TrainingSample], tokens: int) -> Iterator[list[int]]:
    """Group the indices of samples by length, shortest first, at most `tokens` with padding in a group (or one)."""
    lengths = [len(rollout.prompt) + len(rollout.response) for rollout in rollouts]
    found: list[int] = []
    for place in sorted(range(len(rollouts)), key=lengths.__getitem__):
        if found and (len(found) + 1) * lengths[place] > tokens:
            yield found
            found = []
        found.append(place)
    if found:
        yield found


def steps(rollouts: Sequence[TrainingSample], tokens: int) -> list[list[int]]:
    """Split the indices of samples, in order, into optimizer steps of about `tokens` drafted tokens each."""
    total = sum(rollout.drafted for rollout in rollouts)
    count = min(max(round(total / tokens), 1), max(len(rollouts), 1))
    found: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for place, rollout in enumerate(rollouts):
        # By the middle of the sample, so that a long one does not get a step of its own.
        middle = before + rollout.drafted / 2
        found[min(int(middle * count / max(total, 1)), count - 1)].append(place)
        before += rollout.drafted
    return [each for each in found if each]
