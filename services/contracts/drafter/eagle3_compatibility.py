"""Compatibility of an EAGLE-3 head with its target model, and with the head in use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.contracts.drafter.checkpoint import layers_of

_SHARED = ("hidden_size", "vocab_size", "head_dim", "num_key_value_heads")
# Settings that change the function of the same tensors.
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
    """Return the reasons why a head cannot draft for a model; empty if it can.

    Args:
        config: config of the head, as `services.contracts.drafter.checkpoint` reads it.
        target: hidden_size, vocab_size, head_dim, num_key_value_heads and num_hidden_layers of the model. The
            head shares the KV blocks of the model, so its KV must have the same shape.
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
    """Return the reasons why a head cannot replace another in a running engine; empty if it can."""
    return [
        f"{name} is {config.get(name)!r}, in use is {current.get(name)!r}"
        for name in _FORM
        if config.get(name) != current.get(name)
    ]
