"""Options of PEFT's LoraConfig, and what becomes of an adapter that has them. Imports PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

RIGHT = ""
TIED = "lm_head.weight different values, but they are tied"


@dataclass(frozen=True)
class Row:
    """Options of a LoraConfig, and what becomes of them: RIGHT, or what the refusal has in it."""

    options: Mapping[str, Any]
    tied: str = RIGHT
    untied: str = RIGHT
    by_fleet: str = RIGHT
    """Of the adapter alone, merged by an instance with the weights that it has; where there is one."""


def named(option: str) -> str:
    return f"LoraConfig.{option} gives"


def config_of(name: str, **options: Any) -> Any:
    return getattr(import_module("peft.tuners.lora.config"), name)(**options)


ROWS = {
    "plain": Row({}),
    "words about it": Row(
        {
            "task_type": "CAUSAL_LM",
            "peft_type": "LORA",
            "auto_mapping": {"base_model_class": "a"},
            "peft_version": "0.1",
            "base_model_name_or_path": None,
            "revision": "main",
            "megatron_core": "megatron.other",
            "qalora_group_size": 8,
            "loftq_config": {},
            "runtime_config": config_of("LoraRuntimeConfig", ephemeral_gpu_offload=True),
        }
    ),
    "not trained": Row({"inference_mode": True}),
    "rank and scale": Row({"r": 3, "lora_alpha": 5, "lora_dropout": 0.5}),
    "rank-stabilized": Row({"use_rslora": True}),
    "all linear": Row({"target_modules": "all-linear"}),
    "some layers": Row({"layers_to_transform": [1], "layers_pattern": "layers"}),
    "but one": Row({"exclude_modules": ["layers.0.self_attn.q_proj"]}),
    "patterns": Row({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}, by_fleet="rank_pattern"),
    "alpha pattern": Row({"alpha_pattern": {"v_proj": 3}}, by_fleet="alpha_pattern"),
    "transposed": Row({"fan_in_fan_out": True}),
    "all biases": Row({"bias": "all"}, by_fleet="bias"),
    "biases of its layers": Row({"bias": "lora_only"}, by_fleet="bias"),
    "bias of its own": Row({"lora_bias": True}, by_fleet="lora_bias"),
    "bias where there is none": Row(
        {"lora_bias": True, "target_modules": ["o_proj"]},
        *2 * ("LoraConfig.lora_bias",),
        by_fleet="lora_bias",
    ),
    "DoRA": Row({"use_dora": True, "target_modules": "all-linear"}, by_fleet="use_dora"),
    "DoRA of embeddings": Row(
        {"use_dora": True, "target_modules": ["embed_tokens"]}, named("target_modules"), by_fleet="use_dora"
    ),
    "saved norm": Row({"modules_to_save": ["norm"]}, by_fleet="modules_to_save"),
    "saved embedding": Row(
        {"modules_to_save": ["embed_tokens"]}, named("modules_to_save"), by_fleet="modules_to_save"
    ),
    "saved head": Row({"modules_to_save": ["lm_head"]}, named("modules_to_save"), by_fleet="modules_to_save"),
    "saved both": Row(
        {"modules_to_save": ["lm_head", "embed_tokens"]}, named("modules_to_save"), by_fleet="modules_to_save"
    ),
    "saved together": Row(
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, by_fleet="modules_to_save"
    ),
    "saved with layers of the adapter": Row(
        {"modules_to_save": ["mlp"], "target_modules": ["q_proj", "down_proj"]}, by_fleet="modules_to_save"
    ),
    "embedding": Row(
        {"target_modules": ["embed_tokens"]}, named("target_modules"), by_fleet="lora_embedding"
    ),
    "head": Row({"target_modules": ["lm_head"]}, TIED),
    "embedding and head": Row(
        {"target_modules": ["embed_tokens", "lm_head"]}, TIED, by_fleet="lora_embedding"
    ),
    "embedding and head together": Row(
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, by_fleet="lora_embedding"
    ),
    "together with other scales": Row(
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "alpha_pattern": {"lm_head": 32}},
        TIED,
        by_fleet="alpha_pattern",
    ),
    "tokens": Row({"trainable_token_indices": [1, 2, 3]}, by_fleet="trainable_token_indices"),
    "tokens of the head": Row(
        {"trainable_token_indices": {"lm_head": [1, 2]}},
        named("trainable_token_indices"),
        by_fleet="trainable_token_indices",
    ),
    "parameters": Row(
        {"target_parameters": ["mlp.down_proj.weight"], "target_modules": []}, by_fleet="target_parameters"
    ),
    "parameter of the embedding": Row(
        {"target_parameters": ["embed_tokens.weight"], "target_modules": []},
        named("target_parameters"),
        by_fleet="target_parameters",
    ),
    **{f"from {start}": Row({"init_lora_weights": start}) for start in (False, "gaussian", "orthogonal")},
    "from EVA": Row({"init_lora_weights": "eva", "eva_config": config_of("EvaConfig")}),
    "from LoRA-GA": Row(
        {"init_lora_weights": "lora_ga", "lora_ga_config": config_of("LoraGAConfig")},
        by_fleet="init_lora_weights",
    ),
    "from CorDA": Row(
        {"init_lora_weights": "corda", "corda_config": config_of("CordaConfig")}, by_fleet="init_lora_weights"
    ),
    **{
        f"from {start}": Row({"init_lora_weights": start}, by_fleet="init_lora_weights")
        for start in ("olora", "pissa", "pissa_niter_4", "mica")
    },
    "VeLoRA": Row({"velora_config": config_of("VeloraConfig", num_groups=4)}, by_fleet="velora_config"),
    **{
        option: Row({option: value}, RIGHT, RIGHT, option)
        for option, value in {
            "monteclora_config": config_of("MontecloraConfig"),
            "use_bdlora": config_of(
                "BdLoraConfig", target_modules_bd_a=["q_proj"], nblocks=2, match_strict=False
            ),
            "kasa_config": config_of("KasaConfig"),
        }.items()
    },
    **{
        option: Row({option: value}, option, option, option)
        for option, value in {
            "layer_replication": [[0, 2], [0, 2]],
            "use_qalora": True,
            "alora_invocation_tokens": [1],
        }.items()
    },
}
# PEFT makes no model of these here: the first needs Megatron, the second other adapters, the third SciPy.
UNMADE: dict[str, Any] = {
    "megatron_config": {"a": 1},
    "arrow_config": {"top_k": 3},
    "init_lora_weights": "loftq",
}
