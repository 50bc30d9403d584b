"""Training-time test (EAGLE-3): the head run over whole samples as the draft loop runs it, at every draft position.

A chain is a draft that starts after position p of a sample. Its row 0 has the policy's feature of p; its row k
has the head's own output of row k - 1. Row k of chain p attends to what the KV cache of the draft loop holds
then:

    real rows 0..p, made from the policy's features, and rows 1..k of its own chain.

All chains of a sample are computed at once. The tokens of a chain are those of the sample, which the loop
drafts as long as it is correct; nothing after a wrong token is ever used, so the logits equal the loop's at
every position that matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.drafter.learning.head import Eagle3Head, Entries


class Unroll(nn.Module):
    """The head under training-time test; a call uses every parameter except those of the output."""

    def __init__(self, head: Eagle3Head, chunk_entries: int) -> None:
        super().__init__()
        self.head = head
        self.chunk_entries = chunk_entries

    def forward(self, features: Tensor, embeddings: Tensor, depth: int, first: int = 0) -> list[Tensor]:
        """Return the outputs of every draft position, for `Eagle3Head.logits`.

        Args:
            features: those of the policy at each token, [B, L, layers * h].
            embeddings: those of each token, [B, L, h].
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
