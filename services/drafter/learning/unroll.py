"""Batches of samples as tensors, and the training-time test that runs the head over them (EAGLE-3).

`Unroll` computes the outputs of every draft that could start in the samples of a `Pass`, as the draft loop would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.drafter.learning.data import TrainingSample
from services.drafter.learning.head import Eagle3Head, Entries


@dataclass(frozen=True, slots=True)
class Pass:
    """Tensors of some samples, each of at least two response tokens.

    A drafter can draft all tokens of a response but the first, which the prefill samples. A pass numbers those
    tokens of all its samples consecutively: its *rows*. Row i of a sample with n response tokens, 0 <= i < n - 1,
    stands for response token i + 1, whose distribution is the policy's output at position prompt + i. Draft
    position k of a draft that starts after position prompt - 1 + j predicts row j + k.

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
        """Return the rows, [n], that a draft can predict at position `place`: it starts `place` rows earlier."""
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
        # Assigned by its middle, so that a long sample does not get a separate step.
        middle = before + rollout.drafted / 2
        found[min(int(middle * count / max(total, 1)), count - 1)].append(place)
        before += rollout.drafted
    return [each for each in found if each]


class Unroll(nn.Module):
    """The head under training-time test; a call uses every parameter except the output layer's.

    A chain is a draft that starts after position p of a sample. Its row 0 has the policy's feature of p; its row k
    has the head's own output of row k - 1. Row k of chain p attends to what the KV cache of the draft loop holds
    then:

        real rows 0..p, made from the policy's features, and rows 1..k of the same chain.

    All chains of a sample are computed at once. The tokens of a chain are the tokens of the sample, which the loop
    drafts as long as it is correct; nothing after a wrong token is ever used, so the logits equal the loop's at
    every position that matters.
    """

    def __init__(self, head: Eagle3Head, chunk_entries: int) -> None:
        super().__init__()
        self.head = head
        self.chunk_entries = chunk_entries

    def forward(self, features: Tensor, embeddings: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """Return the outputs of every draft position, for `Eagle3Head.logits`.

        Args:
            features: the policy's features of each token, [B, L, layers * h].
            embeddings: the policy's embedding of each token, [B, L, h].
            depth: draft positions, at least 1.
            first: position after which the first chain starts; drafts within a prompt are useless.

        Returns:
            For position k < depth [B, L - 1 - k - first, h]: entry j belongs to the chain after position first + j
            and predicts the token at position first + j + k + 2. Fewer positions if samples are too short.
        """
        rows = features.shape[1] - 1
        hidden = self.head.combine(features[:, :-1])
        positions = torch.arange(rows, device=features.device)
        real = self.head.enter(embeddings[:, 1:], hidden, positions)
        # With `enable_gqa`, torch's kernels on CUDA either take no float32, or store all scores, [B, heads, L, L].
        shared = real.query.shape[1] // real.key.shape[1]
        seen = nn.functional.scaled_dot_product_attention(
            real.query,
            real.key.repeat_interleave(shared, 1),
            real.value.repeat_interleave(shared, 1),
            is_causal=True,
        )
        outputs = [self.head.leave(hidden, seen)[:, first:]]
        own: list[Entries] = []
        for place in range(1, depth):
            count = rows - place - first
            if count < 1:
                break
            hidden = outputs[-1][:, :count]
            following = embeddings[:, first + place + 1 :]
            own.append(self.head.enter(following, hidden, positions[first + place :]))
            outputs.append(self.head.leave(hidden, self._attend(own, real, first)))
        return outputs

    def _attend(self, own: Sequence[Entries], real: Entries, first: int) -> Tensor:
        """Return the attention of the newest rows, [B, heads, n, d], in blocks of bounded numbers of scores."""
        query = own[-1].query
        batch, heads, count, _ = query.shape
        keys = [entries.key[:, :, :count] for entries in own]
        values = [entries.value[:, :, :count] for entries in own]
        block = max(self.chunk_entries // (batch * heads * real.key.shape[2]), 1)
        if count <= block:
            return _attend(query, real.key, real.value, torch.stack(keys), torch.stack(values), first)
        parts = []
        for start in range(0, count, block):
            end = min(start + block, count)
            visible = first + end
            parts.append(
                checkpoint(
                    _attend,
                    query[:, :, start:end],
                    real.key[:, :, :visible],
                    real.value[:, :, :visible],
                    torch.stack([key[:, :, start:end] for key in keys]),
                    torch.stack([value[:, :, start:end] for value in values]),
                    first + start,
                    use_reentrant=False,
                )
            )
        return torch.cat(parts, 2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor, own_values: Tensor, first: int
) -> Tensor:
    """Attend from the chains after positions first, first + 1, ... to real rows up to theirs and to own rows.

    query [B, heads, n, d]; key and value [B, kv heads, m, d]; own_keys and own_values [k, B, kv heads, n, d].
    Returns [B, heads, n, d].
    """
    heads, count, width = query.shape[1:]
    kv_heads, visible = key.shape[1:3]
    # Query heads that share a key-value head are adjacent, as in vLLM.
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads)) * width**-0.5
    real_scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    chains = torch.arange(first, first + count, device=query.device)
    later = torch.arange(visible, device=query.device) > chains.unsqueeze(1)
    real_scores = real_scores.masked_fill(later, -torch.inf)
    own_scores = (grouped.unsqueeze(0) * own_keys.unsqueeze(3)).sum(-1).movedim(0, -1)
    shares = torch.cat([real_scores, own_scores], -1).float().softmax(-1).to(query.dtype)
    from_real = shares[..., :visible] @ value.unsqueeze(2)
    from_own = (shares[..., visible:].movedim(-1, 0).unsqueeze(-1) * own_values.unsqueeze(3)).sum(0)
    return (from_real + from_own).flatten(1, 2)
