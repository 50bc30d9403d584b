"""Tiny random models with the shape of real ones, in Hugging Face layout. Milliseconds to make and to step.

Written without transformers, whose import alone takes longer than an instance to start. The weights are scaled
up against a usual initialisation: the distributions are far from uniform and differ from position to position, so
that a wrong position, seed or KV block shows in the tokens at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 512
END_TOKEN = 1
_DEVIATION = 0.08
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    # Two layers in three see 32 positions.
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}
"""Fields of the config that only one of them has."""
_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": END_TOKEN,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def tiny_model(folder: Path, architecture: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model into a folder, made when it is not there; the folder.

    Args:
        folder: of config.json and model.safetensors.
        architecture: one of `_CLASSES`.
        seed: of the weights; another seed is another policy with the same tensors.
        changes: fields of the config that differ from the tiny ones, such as `tie_word_embeddings=False`.
    """
    named = {"architectures": [_CLASSES[architecture]], "model_type": architecture}
    config = _CONFIG | _OWN.get(architecture, {}) | named | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tiny_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights under the names that checkpoints give them: norms are 1, all else normal; float32."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * _DEVIATION
        for name, shape in _shapes(config)
    }


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _layer_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (width, hidden)
        if config["model_type"] == "qwen2":
            yield f"self_attn.{name}_proj.bias", (width,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    for mlp in _mlps(config):
        size = inner if mlp == "mlp" else config["moe_intermediate_size"]
        yield f"{mlp}.gate_proj.weight", (size, hidden)
        yield f"{mlp}.up_proj.weight", (size, hidden)
        yield f"{mlp}.down_proj.weight", (hidden, size)
    if config["model_type"] == "qwen3_moe":
        yield "mlp.gate.weight", (config["num_experts"], hidden)
    if config["model_type"] == "gemma3_text":
        yield "pre_feedforward_layernorm.weight", (hidden,)
        yield "post_feedforward_layernorm.weight", (hidden,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _mlps(config: dict[str, Any]) -> list[str]:
    if config["model_type"] != "qwen3_moe":
        return ["mlp"]
    return [f"mlp.experts.{expert}" for expert in range(config["num_experts"])]
