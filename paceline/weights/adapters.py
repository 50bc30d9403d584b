"""Write LoRA adapters as versions of the weights: small folders that instances merge with a full version.

The options of PEFT's LoraConfig are checked against allow-lists, one for the merge by instances and one for the
merge by the trainer. An option that a list lacks is refused unless its value has no effect, so that a newer PEFT
cannot silently change the meaning of an adapter.
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
    """`lora_A` and `lora_B` under the names of PEFT."""
    config: Mapping[str, Any]
    """Content of `adapter_config.json`: `r`, `lora_alpha`, `use_rslora`, `target_modules` and so on."""


def write(folder: Path, source: Adapter | Path, base: BaseWeights) -> Expansion:
    """Write an adapter into an empty folder.

    Args:
        folder: the folder to write.
        source: an adapter, or the folder of one (`save_pretrained` of PEFT).
        base: the full version on which it builds.

    Raises:
        ValueError: the source is not an adapter.
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
    """Return the full version on which the next adapter builds: the published one, or the published adapter's base.

    Args:
        published: the versions that the fleet serves.
        root: folder of the written adapters, such as `adapter-00000007`.
        model: folder of the model with which the fleet started.

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
        found = expansion.read(folder)
        if found is not None and expansion.checksum(folder) == checksum:
            return found.base
    raise ValueError(f"version {version} is an adapter that is not in {root}: push full weights first")


def _plain(value: object) -> object:
    """Return a value of PEFT's configurations as JSON has it: module names are in sets there."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


ANY = None
"""Any value is allowed: the option says where adapters are, or how they were made, which their tensors show."""

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
    # Other values change the base.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "layers_to_transform": ANY,
    "layers_pattern": ANY,
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "megatron_config": (None,),
    "megatron_core": ANY,
    "trainable_token_indices": (None, [], {}),
    # Options of initialisations have no effect without `init_lora_weights`.
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
"""Options, and their values, of adapters that an instance can merge with its weights. The others are refused."""

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
    # It changes the backward pass only.
    "velora_config": ANY,
    "lora_bias": ANY,
    "target_parameters": ANY,
    "use_bdlora": ANY,
    "kasa_config": ANY,
    # Its noise is used in training only, like dropout.
    "monteclora_config": ANY,
}
"""Options, and their values, of adapters that the trainer's process can merge."""

_NO_EFFECT: tuple[Any, ...] = (None, False, "", [], (), {})


def refused(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...] | None]) -> dict[str, Any]:
    """Return the options that the allow-list does not admit, with their values."""
    return {
        name: value
        for name, value in config.items()
        if (values := allowed.get(name, _NO_EFFECT)) is not ANY and _without_steps(value) not in values
    }


def _without_steps(value: Any) -> Any:
    """Return a value, with `pissa_niter_16` (a number of iterations of the initialisation) as `pissa`."""
    return "pissa" if isinstance(value, str) and value.startswith("pissa_niter_") else value
