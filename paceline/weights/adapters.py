"""Write LoRA adapters as versions of the weights: small folders that instances merge with a full version.

The options of PEFT's LoraConfig are allow-lists, one for the merge by the fleet and one for the merge by the
trainer. An option that stands in neither is refused unless its value has no effect, so that a newer PEFT cannot
silently change the meaning of an adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import types as t
from paceline.weights import expansion, safetensors
from paceline.weights.expansion import ADAPTER_CHECKSUM, BaseWeights, Expansion, ExpansionKind
from paceline.weights.safetensors import pairs_of

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model"
_NAME_OF_ADAPTER = ".default."


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in memory."""

    tensors: safetensors.Tensors
    """`lora_A` and `lora_B` by the names that PEFT gives them."""
    config: Mapping[str, Any]
    """Content of `adapter_config.json`: `r`, `lora_alpha`, `use_rslora`, `target_modules` and so on."""


def write(folder: Path, source: Adapter | Path, base: BaseWeights) -> Expansion:
    """Write an adapter into an empty folder.

    Args:
        folder: where it goes.
        source: an adapter, or the folder of one (`save_pretrained` of PEFT).
        base: the full version that it builds on.

    Raises:
        ValueError: the source is no adapter.
        OSError: the disk is full, for example.
    """
    if isinstance(source, Path):
        names = [CONFIG, *(path.name for path in sorted(source.glob(f"{_WEIGHTS}*.safetensors")))]
        if len(names) == 1 or not (source / CONFIG).is_file():
            raise ValueError(f"{source} needs {CONFIG} and {_WEIGHTS}.safetensors to be an adapter")
        for name in names:
            shutil.copyfile(source / name, folder / name)
    else:
        safetensors.write(
            folder,
            ((name.replace(_NAME_OF_ADAPTER, "."), tensor) for name, tensor in pairs_of(source.tensors)),
        )
        (folder / safetensors.INDEX).unlink()
        for path in folder.glob("model*.safetensors"):
            path.rename(folder / path.name.replace("model", _WEIGHTS, 1))
        config = {"peft_type": "LORA", **source.config}
        (folder / CONFIG).write_text(json.dumps(config, default=_plain))
        names = sorted(path.name for path in folder.iterdir())
    return expansion.write(folder, ExpansionKind.ADAPTER, base, names)


def base_of(published: t.Versions, root: Path, model: Path) -> BaseWeights:
    """Return the full version that an adapter builds on: the published one, or that of the published adapter.

    Args:
        published: what the fleet serves.
        root: where adapters were written, as `adapter-00000007`.
        model: what the fleet started with.

    Raises:
        ValueError: the published version is an adapter that is not here.
        OSError: the model cannot be read.
    """
    version, checksum = published.policy_version, published.policy_checksum
    if not checksum:
        return BaseWeights(version, expansion.checksum(model))
    if not checksum.startswith(ADAPTER_CHECKSUM):
        return BaseWeights(version, checksum, published.policy_path)
    for folder in (root / f"adapter-{version:08d}", Path(published.policy_path)):
        told = expansion.read(folder)
        if told is not None and expansion.checksum(folder) == checksum:
            return told.base
    raise ValueError(f"version {version} is an adapter that is not in {root}: push full weights first")


def _plain(value: object) -> object:
    """Return what JSON has for a value of PEFT's configurations, whose modules are sets."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


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
