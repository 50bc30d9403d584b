"""Write LoRA adapters as versions of the weights: small folders that instances merge with a full version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import expansion, safetensors
from paceline import types as t
from paceline.expansion import ADAPTER_CHECKSUM, BaseWeights, Expansion, ExpansionKind
from paceline.tensor_bytes import pairs_of

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
