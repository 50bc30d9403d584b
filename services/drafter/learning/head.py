"""The EAGLE-3 head: one decoder layer that drafts from the policy's features (EAGLE-3, Li et al. 2025).

Row p of it takes the policy's feature of position p, the embedding of the token after it, and stands at position p
(rotary embedding); it names the token after that one. For the row behind the last verified token the feature is the
policy's, for the rows of the draft it is the head's own output, before its last norm. The same numbers as vLLM's
`Eagle3LlamaForCausalLM`, by the same names, so that a state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.drafter import checkpoint

_VARIANTS = (
    "attention_bias",
    "mlp_bias",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
)
"""What vLLM's EAGLE-3 heads can have, and this one has not."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head; the policy's, but for its output and its feed-forward layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    layers: tuple[int, ...]
    """Of the policy, whose outputs are the features."""
    eps: float
    rope_theta: float
    max_positions: int

    def config(self) -> dict[str, Any]:
        """config.json of a checkpoint."""
        return {
            "architectures": [checkpoint.ARCHITECTURE],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "draft_vocab_size": self.draft_vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
                "use_aux_hidden_state": True,
            },
        }

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> HeadShape:
        """The shape that a checkpoint's config says, be it ours or not. ValueError: a head of another build."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        strange = [name for name in _VARIANTS if config.get(name) or config["eagle_config"].get(name)]
        if strange or kind != "default" or config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"not a head of the plain build: {strange or kind}")
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["vocab_size"],
            config["draft_vocab_size"],
            tuple(checkpoint.layers_of(config)),
            float(config.get("rms_norm_eps", 1e-6)),
            float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            int(config.get("max_position_embeddings", 2048)),
        )


@dataclass(frozen=True, slots=True)
class Entries:
    """Queries [B, heads, n, d], keys and values [B, kv heads, n, d] of n rows, rotated."""

    query: Tensor
    key: Tensor
    value: Tensor


class RmsNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Over the last axis, computed in float32."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        kv_width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)


class _FeedForward(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.hidden_norm = RmsNorm(shape.hidden, shape.eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.mlp = _FeedForward(shape.hidden, shape.intermediate)


class Head(nn.Module):
    """The drafter. What attends to what is the caller's: between `enter` and `leave` of its rows."""

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.hidden * len(shape.layers), shape.hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = RmsNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocabulary, bias=False)
        if shape.draft_vocabulary < shape.vocabulary:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocabulary, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(shape.vocabulary, dtype=torch.bool))
            self.set_vocabulary(torch.arange(shape.draft_vocabulary))
        else:
            self.d2t = self.t2d = None
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("_frequencies", 1.0 / shape.rope_theta**half, persistent=False)

    @property
    def tokens(self) -> Tensor | None:
        """The token of each output row, [draft vocabulary], rising; None: each row is its own."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, tokens: Tensor) -> None:
        """Names the tokens of the output rows, [draft vocabulary]. ValueError: not so many, or not rising."""
        if self.d2t is None or self.t2d is None:
            raise ValueError("this head has a row for every token")
        if tokens.shape != self.d2t.shape or not bool((tokens.diff() > 0).all()):
            raise ValueError(f"expected {len(self.d2t)} rising tokens, got {list(tokens.shape)}")
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True

    def combine(self, features: Tensor) -> Tensor:
        """The policy's features [..., layers * h] as one vector each, [..., h]."""
        return self.fc(features)

    def enter(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Entries:
        """Entries of rows: embeddings and hidden [B, n, h], positions [n] or [B, n]."""
        attention = self.midlayer.self_attn
        both = torch.cat([self.midlayer.input_layernorm(embeddings), self.midlayer.hidden_norm(hidden)], -1)
        cos, sin = self._rotation(positions)
        return Entries(
            _rotate(self._split(attention.q_proj(both)), cos, sin),
            _rotate(self._split(attention.k_proj(both)), cos, sin),
            self._split(attention.v_proj(both)),
        )

    def leave(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """The rows' outputs [B, n, h] before the last norm: what the next row of a draft takes for its feature.

        hidden [B, n, h] as given to `enter`; seen [B, heads, n, d] is what the rows' queries attended to.
        """
        layer = self.midlayer
        residual = hidden + layer.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def logits(self, output: Tensor) -> Tensor:
        """Of the draft vocabulary, [..., draft vocabulary]."""
        return self.lm_head(self.norm(output))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def _split(self, x: Tensor) -> Tensor:
        """[B, n, heads * d] -> [B, heads, n, d]."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [1 or B, 1, n, d / 2]."""
        angles = positions.float().unsqueeze(-1) * self._frequencies
        angles = angles if angles.ndim == 3 else angles.unsqueeze(0)
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, heads, n, d], the halves of a head paired."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
