"""Create models with random weights at the size that a benchmark needs. Equal sizes give equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_random_model(folder: Path, *, hidden: int, layers: int, vocab_size: int, length: int) -> Path:
    """Save a Qwen3 with wide distributions, so that equal tokens mean equal computation.

    `length` is its maximum context in tokens.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(folder, Qwen3Config, Qwen3ForCausalLM, **_shape(hidden, layers, vocab_size, length))


def make_random_experts(
    folder: Path, *, hidden: int, layers: int, experts: int, vocab_size: int, length: int
) -> Path:
    """Save a Qwen3-MoE. Each token activates 2 experts of a layer, and an expert is half as wide as the model.

    `length` is its maximum context in tokens.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden // 2,
        "norm_topk_prob": True,
        # Wide enough for tokens to activate different experts.
        "initializer_range": 0.06,
    }
    shape = _shape(hidden, layers, vocab_size, length)
    return _save(folder, Qwen3MoeConfig, Qwen3MoeForCausalLM, **shape, **mixture)


def _shape(hidden: int, layers: int, vocab_size: int, length: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "max_position_embeddings": length,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _save(folder: Path, config: Any, model: Any, **options: Any) -> Path:
    import torch

    torch.manual_seed(0)
    model(config(**options)).save_pretrained(folder)
    return folder
