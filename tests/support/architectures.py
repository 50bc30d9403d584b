"""Tiny random models of many families, built from transformers' own classes.

They take seconds longer to make than those of `models.py`, because transformers is imported: make them where vLLM
is imported already, in an engine's process (`serve_make`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
_DEVIATION = 0.08
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = 40
"""Positions that a layer with a window sees: neither a block nor a multiple of one."""
_WINDOWED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


@dataclass(frozen=True, slots=True)
class Family:
    """Tiny model of a family: transformers' name of it and the fields of its config that differ.

    `dtype` is float32 where vLLM's CPU build takes it.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


FAMILIES = {
    "llama": Family("llama", {"tie_word_embeddings": False}),
    "qwen2-tied": Family("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Family("qwen3"),
    "qwen3-moe": Family(
        "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    ),
    "mistral-window": Family("mistral", {"sliding_window": WINDOW}),
    "gemma3-window": Family("gemma3_text", {**_WINDOWED, "query_pre_attn_scalar": 32}),
    "gpt-oss": Family(
        "gpt_oss", {**_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            **_WINDOWED,
            "global_head_dim": 64,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "granite4-hybrid": Family(
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
        },
    ),
    "nemotron-h": Family(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    "falcon-h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 32,
        },
    ),
    "lfm2": Family(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
        },
    ),
    "qwen3-next": Family(
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        dtype="bfloat16",
    ),
    "deepseek-mla": Family(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "head_dim": 64,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "glm4-moe": Family(
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "cohere2": Family("cohere2", _WINDOWED),
    "olmo3": Family("olmo3", _WINDOWED),
    "phi3": Family("phi3"),
}


def second_of(folder: Path) -> Path:
    """Return the folder of the second policy."""
    return folder.with_name(f"{folder.name}-2")


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a random model of a family into a folder, made when it is not there; the folder.

    Matrices are scaled up against a usual initialisation, so that distributions are far from uniform; vectors, such
    as norms and the decay of a state, stay as transformers initialises them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **_COMMON | family.changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _DEVIATION)
    model.to(getattr(torch, family.dtype)).save_pretrained(folder)
    return folder


def serve_make(pipe: Any, names: dict[str, Path]) -> None:
    """Make two policies of each family in the process of an engine: in its folder and in `second_of` it."""
    for name, folder in names.items():
        make(name, folder)
        make(name, second_of(folder), seed=1)
    pipe.send(None)
