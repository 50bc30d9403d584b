"""The EAGLE-3 head: one decoder layer that drafts from the policy's features (EAGLE-3, Li et al. 2025).

Row p takes the policy's feature of position p and the embedding of token p + 1, with rotary position p, and
predicts token p + 2. The feature of the row after the last verified token is the policy's; rows of the draft take
the head's own output before its last norm. Results and parameter names match vLLM's `Eagle3LlamaForCausalLM`, so a
state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.contracts import drafter_checkpoint

_VARIANTS = (
    "attention_bias",
    "mlp_bias",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
)
"""Options of vLLM's EAGLE-3 heads that this head does not implement."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head; only its output and feed-forward layer may differ from the policy's.

    Fields have the names of a config (`SIZES` of services/contracts/drafter_checkpoint.py).
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[int, ...]
    """Layers of the policy whose outputs are the features."""
    eps: float
    rope_theta: float
    max_positions: int

    def config(self) -> dict[str, Any]:
        """Return the config.json of a checkpoint."""
        return {
            "architectures": [drafter_checkpoint.ARCHITECTURE],
            "model_type": "llama",
            **{name: getattr(self, name) for name in drafter_checkpoint.SIZES},
            "num_hidden_layers": 1,
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
        """Return the shape that a checkpoint's config describes. ValueError: a head with unsupported options."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        strange = [name for name in _VARIANTS if config.get(name) or config["eagle_config"].get(name)]
        if strange or kind != "default" or config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"not a head of the plain build: {strange or kind}")
        return cls(
            **{name: config[name] for name in drafter_checkpoint.SIZES},
            layers=tuple(drafter_checkpoint.layers_of(config)),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            max_positions=int(config.get("max_position_embeddings", 2048)),
        )


@dataclass(frozen=True, slots=True)
class Entries:
    """Rotated queries [B, heads, n, d] and keys, and values [B, kv heads, n, d], of n rows."""

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
        """Normalise over the last axis, in float32."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)


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
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.eps)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.eps)
        self.mlp = _FeedForward(shape.hidden_size, shape.intermediate_size)


class Eagle3Head(nn.Module):
    """The EAGLE-3 head. The caller computes attention, between `enter` and `leave`."""

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.hidden_size * len(shape.layers), shape.hidden_size, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = RmsNorm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        if shape.draft_vocab_size < shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
            self.set_vocabulary(torch.arange(shape.draft_vocab_size))
        else:
            self.d2t = self.t2d = None
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("_frequencies", 1.0 / shape.rope_theta**half, persistent=False)

    @property
    def tokens(self) -> Tensor | None:
        """Token of each output row, [draft vocabulary], ascending; None if rows are tokens."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, tokens: Tensor) -> None:
        """Set the tokens of the output rows, [draft vocabulary]. ValueError: a wrong number, or not ascending."""
        if self.d2t is None or self.t2d is None:
            raise ValueError("this head has a row for every token")
        if tokens.shape != self.d2t.shape or not bool((tokens.diff() > 0).all()):
            raise ValueError(f"expected {len(self.d2t)} ascending tokens, got {list(tokens.shape)}")
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True

    def combine(self, features: Tensor) -> Tensor:
        """Combine the policy's features [..., layers * h] into one vector each, [..., h]."""
        return self.fc(features)

    def enter(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Entries:
        """Return queries, keys and values of rows: embeddings and hidden [B, n, h], positions [n] or [B, n]."""
        attention = self.midlayer.self_attn
        both = torch.cat([self.midlayer.input_layernorm(embeddings), self.midlayer.hidden_norm(hidden)], -1)
        cos, sin = self._rotation(positions)
        return Entries(
            _rotate(self._split(attention.q_proj(both)), cos, sin),
            _rotate(self._split(attention.k_proj(both)), cos, sin),
            self._split(attention.v_proj(both)),
        )

    def leave(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Return the outputs [B, n, h] of rows before the last norm: the features of the next rows of a draft.

        `hidden` [B, n, h] is as passed to `enter`, `seen` [B, heads, n, d] the result of attention.
        """
        layer = self.midlayer
        residual = hidden + layer.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def logits(self, output: Tensor) -> Tensor:
        """Return logits over the draft vocabulary, [..., draft vocabulary]."""
        return self.lm_head(self.norm(output))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def _split(self, x: Tensor) -> Tensor:
        """Reshape [B, n, heads * d] to [B, heads, n, d]."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary angles, [1 or B, 1, n, d / 2]."""
        angles = positions.float().unsqueeze(-1) * self._frequencies
        angles = angles if angles.ndim == 3 else angles.unsqueeze(0)
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to [B, heads, n, d], pairing the halves of a head."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
