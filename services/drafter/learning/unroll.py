"""Training-time test: the head run over whole rollouts as the draft loop will run it, every place of every draft.

A chain is a draft that starts behind position p of a rollout. Its row 0 has the policy's feature of p; its row k
has the head's own output of row k - 1. What row k of chain p may see is what the loop's KV cache holds then:

    real rows 0..p, made from the policy's features, and rows 1..k of its own chain.

All chains of a rollout are computed at once. The tokens of a chain are the rollout's own, which is what the loop
drafts as long as it is right, and what comes after a wrong token is never used: so the logits are the loop's own at
every place that can count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.drafter.learning.head import Entries, Head


class Unroll(nn.Module):
    """The head under training-time test; one call uses every parameter but those of the output."""

    def __init__(self, head: Head, chunk_entries: int) -> None:
        super().__init__()
        self.head = head
        self.chunk_entries = chunk_entries

    def forward(self, features: Tensor, embeddings: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """The outputs of every place, for `Head.logits`.

        Args:
            features: [B, L, layers * h] of the policy at each token.
            embeddings: [B, L, h] of each token.
            depth: places, at least 1.
            first: position behind which the first chain starts; chains of a prompt have nobody to draft for.

        Returns:
            For place k < depth [B, L - 1 - k - first, h]: entry j belongs to the chain behind position first + j,
            and names the token at position first + j + k + 2. Fewer places where rollouts are too short.
        """
        rows = features.shape[1] - 1
        hidden = self.head.combine(features[:, :-1])
        positions = torch.arange(rows, device=features.device)
        real = self.head.enter(embeddings[:, 1:], hidden, positions)
        seen = nn.functional.scaled_dot_product_attention(
            real.query, real.key, real.value, is_causal=True, enable_gqa=True
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
        """What the newest rows see, [B, heads, n, d]; in blocks where all scores at once would be too many."""
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
    """Attention of chains behind positions first, first + 1, ... to real rows up to theirs and to their own rows.

    query [B, heads, n, d]; key and value [B, kv heads, m, d]; own_keys and own_values [k, B, kv heads, n, d].
    Returns [B, heads, n, d].
    """
    heads, count, width = query.shape[1:]
    kv_heads, visible = key.shape[1:3]
    # One group of query heads for each key-value head, as in vLLM: heads of a group are neighbours.
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
