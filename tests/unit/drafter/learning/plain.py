"""The head and its draft loop once more, written out token by token with a KV cache, as an engine runs them."""

from __future__ import annotations

import torch
from torch import Tensor


class PlainHead:
    """Reads a checkpoint's tensors; one row at a time, one position of cache for each."""

    def __init__(self, config: dict, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def feature(self, features: Tensor) -> Tensor:
        """[layers * h] -> [h]."""
        return self.tensors["fc.weight"] @ features

    def row(self, embedding: Tensor, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Logits, and what the next row of a draft takes; appends to the cache."""
        t, c = self.tensors, self.config
        d, heads, kv = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        both = torch.cat(
            [self._norm(embedding, "midlayer.input_layernorm"), self._norm(hidden, "midlayer.hidden_norm")]
        )
        q = (t["midlayer.self_attn.q_proj.weight"] @ both).view(heads, d)
        k = (t["midlayer.self_attn.k_proj.weight"] @ both).view(kv, d)
        v = (t["midlayer.self_attn.v_proj.weight"] @ both).view(kv, d)
        self.keys.append(torch.stack([self._rotate(each, position) for each in k]))
        self.values.append(v)
        seen = []
        for head in range(heads):
            mine = head // (heads // kv)
            query = self._rotate(q[head], position)
            scores = torch.stack([query @ key[mine] for key in self.keys]) / d**0.5
            shares = scores.softmax(0)
            seen.append(sum(share * value[mine] for share, value in zip(shares, self.values, strict=True)))
        x = hidden + t["midlayer.self_attn.o_proj.weight"] @ torch.cat(seen)
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate = t["midlayer.mlp.gate_proj.weight"] @ y
        up = t["midlayer.mlp.up_proj.weight"] @ y
        out = x + t["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return t["lm_head.weight"] @ self._norm(out, "norm"), out

    def forget(self, rows: int) -> None:
        """Drop the last rows of the cache, those of a draft."""
        del self.keys[len(self.keys) - rows :], self.values[len(self.values) - rows :]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean() + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        out = torch.empty_like(x)
        for i in range(half):
            angle = torch.tensor(position * theta ** (-2 * i / len(x)))
            out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return out


def draft_logits(
    head: PlainHead, tokens: list[int], features: Tensor, embed: Tensor, prompt: int, depth: int
) -> dict[tuple[int, int], Tensor]:
    """Logits of place k of the draft behind position p, for every p from prompt - 1, by running the loop.

    The cache holds the real rows up to p; the rows of a draft are dropped when it is verified. What the loop drafts
    is taken to be right: the rollout's own tokens.
    """
    found = {}
    for p in range(len(tokens) - 1):
        logits, hidden = head.row(embed[tokens[p + 1]], head.feature(features[p]), p)
        if p < prompt - 1:
            continue
        drafted = 0
        for place in range(depth):
            if p + place + 2 >= len(tokens):
                break
            found[p, place] = logits
            if place + 1 < depth:
                logits, hidden = head.row(embed[tokens[p + place + 2]], hidden, p + place + 1)
                drafted += 1
        head.forget(drafted)
    return found
