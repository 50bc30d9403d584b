"""Whether the config of an EAGLE-3 head fits the model it drafts for, and the head that is in use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.drafter.checkpoint import layers_of

_SHARED = ("hidden_size", "vocab_size", "head_dim", "num_key_value_heads")
# What makes the same tensors another function.
_FORM = (
    *_SHARED,
    "model_type",
    "draft_vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "eagle_config",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "logit_scale",
)


def unlike_target(config: Mapping[str, Any], target: Mapping[str, int]) -> list[str]:
    """Why a head cannot draft for a model; nothing: it can.

    Args:
        config: of the head, as `services.drafter.checkpoint` reads it.
        target: hidden_size, vocab_size, head_dim, num_key_value_heads and num_hidden_layers of the model. The KV of
            the head is kept in the same blocks as the model's, so it has the same shape.
    """
    faults = [
        f"{name} is {config[name]}, the model's is {target[name]}"
        for name in _SHARED
        if config[name] != target[name]
    ]
    layers, last = layers_of(config), target["num_hidden_layers"]
    if layers[-1] >= last:
        faults.append(f"it reads layers {layers}, the model has {last}")
    return faults


def unlike_current(config: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Why a head cannot take the place of another in a running engine; nothing: it can."""
    return [
        f"{name} is {config.get(name)!r}, in use is {current.get(name)!r}"
        for name in _FORM
        if config.get(name) != current.get(name)
    ]
