"""Write and read checkpoints of a drafter, in the format in which vLLM loads an EAGLE-3 head.

    checkpoint = save(parent, version, config, tensors)  # parent/drafter-000007/{config.json, model.safetensors}
    config, tensors = load(checkpoint.path, checkpoint.sha256)

A folder appears under its name complete or not at all, and references to it include the SHA-256 of
model.safetensors. Tensors, with h = hidden_size, a = heads * head_dim, c = key-value heads * head_dim:

    fc.weight                                        [h, h * layers]   the features of the policy's layers into one
    midlayer.{input_layernorm, hidden_norm, post_attention_layernorm}.weight  [h]
    midlayer.self_attn.{q_proj [a, 2h], k_proj [c, 2h], v_proj [c, 2h], o_proj [h, a]}.weight
    midlayer.mlp.{gate_proj [m, h], up_proj [m, h], down_proj [h, m]}.weight
    norm.weight [h]     lm_head.weight [draft_vocab_size, h]
    d2t [draft_vocab_size] int64: the token of row i is i + d2t[i];  t2d [vocab_size] bool: tokens with a row

d2t and t2d are omitted if the draft vocabulary is the whole one, since vLLM then does not load them. The embedding
is the policy's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.files import MOST_CONFIG_BYTES, open_regular, parse_json, read_regular, sync
from services.contracts.errors import DataLoss
from services.contracts.files import write_durably

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
_NAME = re.compile(r"drafter-(\d{6,})")
SIZES = (
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Fields of a config with sizes of the head, each a positive integer."""
_SHARED = ("hidden_size", "vocab_size", "head_dim", "num_key_value_heads")
# Settings that change the function of the tensors.
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


class CorruptCheckpoint(DataLoss):
    """The folder has no usable drafter; `what` says why."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        super().__init__(f"drafter {path}: {what}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Folder and version of a drafter, and the SHA-256 of its model.safetensors in hexadecimal."""

    path: Path
    version: int
    sha256: str


def save(
    parent: Path, version: int, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Checkpoint:
    """Write `parent`/drafter-<version>, replacing an existing folder.

    Raises:
        ValueError: a version below 1, or a config or tensors that `load` would refuse.
        OSError: the folder cannot be written; an existing one is unchanged.
    """
    from safetensors.torch import save as to_bytes

    if version < 1:
        raise ValueError(f"a drafter's version must be at least 1, got {version}")
    found = folder_of(parent, version)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if fault := _fault(config, held):
        raise ValueError(f"drafter {version}: {fault}")
    content = to_bytes(held)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=parent, prefix=f".{found.name}-", ignore_cleanup_errors=True
    ) as made:
        fresh = Path(made) / "new"
        fresh.mkdir()
        write_durably(fresh / WEIGHTS, content)
        write_durably(fresh / CONFIG, (json.dumps(dict(config), indent=2) + "\n").encode())
        sync(fresh)
        if found.exists():
            # A folder cannot be replaced in one call; a reader in between gets an error, never a mixture.
            found.rename(Path(made) / "old")
        fresh.rename(found)
        sync(parent)
    return Checkpoint(found, version, hashlib.sha256(content).hexdigest())


def load(path: Path, sha256: str = "") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors (in host memory) of a drafter, from a single read of the file, which is verified.

    Raises:
        CorruptCheckpoint: missing or unreadable files, a SHA-256 other than `sha256` (if not empty), or an invalid
            config or tensors: missing, of wrong shapes or types, not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    config = read_config(path)
    content = _read(path, WEIGHTS, _most_bytes(config))
    if sha256 and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise CorruptCheckpoint(path, f"the SHA-256 of {WEIGHTS} is {found}, expected {sha256}")
    try:
        tensors = from_bytes(content)
    except (SafetensorError, KeyError) as error:
        raise CorruptCheckpoint(path, f"{WEIGHTS} is truncated or corrupt: {error}") from error
    if fault := _fault(config, tensors):
        raise CorruptCheckpoint(path, fault)
    return config, tensors


def verify(path: Path, sha256: str) -> None:
    """Check only the SHA-256, without torch; CorruptCheckpoint if it differs or the file cannot be read."""
    if (found := digest(path)) != sha256:
        raise CorruptCheckpoint(path, f"the SHA-256 of {WEIGHTS} is {found}, expected {sha256}")


def digest(path: Path) -> str:
    """Return the SHA-256 of a drafter's weights, without torch; CorruptCheckpoint if they cannot be read."""
    try:
        with os.fdopen(open_regular(path / WEIGHTS), "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CorruptCheckpoint(path, f"{WEIGHTS} cannot be read: {error.strerror}") from error


def folder_of(parent: Path, version: int) -> Path:
    """Return the folder in which `save` writes a version."""
    return parent / f"drafter-{version:06d}"


def version_of(path: Path) -> int:
    """Return the version in a folder's name; ValueError if it is not the name of a drafter."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path.name!r} is no drafter's name, which is drafter- and six digits")
    return int(found[1])


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a drafter; CorruptCheckpoint if it is missing or not of an EAGLE-3 head."""
    try:
        config = parse_json(_read(path, CONFIG, MOST_CONFIG_BYTES))
    except ValueError as error:
        raise CorruptCheckpoint(path, f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CorruptCheckpoint(path, f"{CONFIG} is not an object")
    if fault := _config_fault(config):
        raise CorruptCheckpoint(path, fault)
    return config


def discard(path: Path) -> None:
    """Remove a folder if its name is a drafter's."""
    if _NAME.fullmatch(path.name):
        shutil.rmtree(path, ignore_errors=True)


def unlike_target(config: Mapping[str, Any], target: Mapping[str, int]) -> list[str]:
    """Return the reasons why a head cannot draft for a model; empty if it can.

    Args:
        config: config of the head, as `read_config` returns it.
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


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a drafter with this config."""
    h, m, rows = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    a = config["num_attention_heads"] * config["head_dim"]
    c = config["num_key_value_heads"] * config["head_dim"]
    found = {
        "fc.weight": (h, h * len(layers_of(config))),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (a, 2 * h),
        "midlayer.self_attn.k_proj.weight": (c, 2 * h),
        "midlayer.self_attn.v_proj.weight": (c, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, a),
        "midlayer.mlp.gate_proj.weight": (m, h),
        "midlayer.mlp.up_proj.weight": (m, h),
        "midlayer.mlp.down_proj.weight": (h, m),
        "norm.weight": (h,),
        "lm_head.weight": (rows, h),
    }
    if rows < config["vocab_size"]:
        found |= {"d2t": (rows,), "t2d": (config["vocab_size"],)}
    return found


def layers_of(config: Mapping[str, Any]) -> list[int]:
    """Return the policy's layers whose outputs are the features, numbered as transformers' hidden_states."""
    return list(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


def _config_fault(config: Mapping[str, Any]) -> str:
    if config.get("architectures") != [ARCHITECTURE]:
        return f"architectures is {config.get('architectures')}, expected [{ARCHITECTURE!r}]"
    for name in SIZES:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name} is {value!r}, expected a positive integer"
    eagle = config.get("eagle_config")
    layers = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    if not isinstance(layers, list) or not layers or not all(type(each) is int for each in layers):
        return "eagle_config names no eagle_aux_hidden_state_layer_ids"
    if layers != sorted(set(layers)) or layers[0] < 1:
        return f"eagle_aux_hidden_state_layer_ids is {layers}, expected rising numbers from 1"
    if config["draft_vocab_size"] > config["vocab_size"]:
        return "draft_vocab_size is above vocab_size"
    return ""


def _fault(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the first fault of a config and its tensors, or an empty string."""
    if fault := _config_fault(config):
        return fault
    expected = shapes(config)
    if expected.keys() != tensors.keys():
        missing, foreign = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        return f"tensors missing: {missing}, not of a drafter: {foreign}"
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"
        if name in ("d2t", "t2d"):
            continue
        if not tensor.is_floating_point():
            return f"{name} is {tensor.dtype}, expected a floating-point type"
        if not bool(tensor.isfinite().all()):
            return f"{name} has values that are NaN or infinite"
    return _vocabulary_fault(tensors) if "d2t" in expected else ""


def _vocabulary_fault(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a fault if d2t does not name each token of t2d once, in ascending order."""
    import torch

    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return f"d2t and t2d are {d2t.dtype} and {t2d.dtype}, expected int64 and bool"
    if not torch.equal(torch.arange(len(d2t)) + d2t, t2d.nonzero().squeeze(1)):
        return "d2t and t2d do not name the same tokens"
    return ""


def _most_bytes(config: Mapping[str, Any]) -> int:
    """Return the most bytes of a file with the tensors of a config, of at most 8 bytes each, and their names."""
    return 8 * sum(map(math.prod, shapes(config).values())) + MOST_CONFIG_BYTES


def _read(path: Path, name: str, most: int) -> bytes:
    try:
        # Reading reserves memory for `most` bytes, which are more than the file has.
        return read_regular(path / name, min(most, (path / name).stat().st_size))
    except OSError as error:
        raise CorruptCheckpoint(path, f"{name} cannot be read: {error.strerror}") from error
