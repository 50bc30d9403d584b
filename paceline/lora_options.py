"""Options of PEFT's LoraConfig with which an adapter is merged right: by the fleet, and by the trainer. Pure.

Both are allow-lists. An option that stands in neither is refused unless its value asks for nothing, so that a newer
PEFT cannot change what an adapter means without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY = None
"""Any value is right: it says where adapters are, or how they came about, which their tensors show."""

BY_FLEET: Mapping[str, tuple[Any, ...] | None] = {
    "task_type": ANY,
    "peft_type": ("LORA",),
    "auto_mapping": ANY,
    "peft_version": ANY,
    "base_model_name_or_path": ANY,
    "revision": ANY,
    "inference_mode": ANY,
    "r": ANY,
    "target_modules": ANY,
    "exclude_modules": ANY,
    "lora_alpha": ANY,
    "lora_dropout": ANY,
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "use_rslora": (False, True),
    "modules_to_save": (None, []),
    # The others change the base.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "layers_to_transform": ANY,
    "layers_pattern": ANY,
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "megatron_config": (None,),
    "megatron_core": ANY,
    "trainable_token_indices": (None, [], {}),
    # Those of initialisations have no effect without `init_lora_weights`.
    "loftq_config": ANY,
    "eva_config": ANY,
    "corda_config": ANY,
    "lora_ga_config": ANY,
    "use_dora": (False,),
    "velora_config": (None,),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "qalora_group_size": ANY,
    "monteclora_config": (None,),
    "layer_replication": (None, []),
    "runtime_config": ANY,
    "lora_bias": (False,),
    "target_parameters": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "ensure_weight_tying": ANY,
}
"""Values with which an instance merges an adapter with the weights that it has."""

BY_TRAINER: Mapping[str, tuple[Any, ...] | None] = {
    **BY_FLEET,
    "fan_in_fan_out": ANY,
    "bias": ANY,
    "modules_to_save": ANY,
    "init_lora_weights": (
        *(True, False, None, "gaussian", "eva", "orthogonal"),
        *("pissa", "olora", "corda", "lora_ga", "mica"),
    ),
    "rank_pattern": ANY,
    "alpha_pattern": ANY,
    "trainable_token_indices": ANY,
    "use_dora": ANY,
    # Another backward pass, the same policy.
    "velora_config": ANY,
    "lora_bias": ANY,
    "target_parameters": ANY,
    "use_bdlora": ANY,
    "kasa_config": ANY,
    # Its noise belongs to training, as that of dropout does.
    "monteclora_config": ANY,
}
"""Values with which the trainer's process merges the adapter that it trains."""

_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, "", [], (), {})


def refused(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...] | None]) -> dict[str, Any]:
    """Return the options whose values cannot be merged, with the values, by name."""
    return {
        name: value
        for name, value in config.items()
        if (values := allowed.get(name, _ASKS_FOR_NOTHING)) is not ANY and _without_steps(value) not in values
    }


def _without_steps(value: Any) -> Any:
    """Return a value; of `pissa_niter_16`, which says how exactly PiSSA begins, what it begins with."""
    return "pissa" if isinstance(value, str) and value.startswith("pissa_niter_") else value
