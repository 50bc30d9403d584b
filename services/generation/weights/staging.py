"""Stage weights: read them once, check them in full, keep them in host memory until they are applied.

A reload that fails half-way leaves vLLM unusable, so nothing reaches the engine that has not passed here:
names, shapes, dtypes, finiteness and checksum. Every file is read once, into memory, and hashed and parsed from
there, so what was checked is what is applied, whatever happens to the folder in between.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from paceline.errors import Violation
from services.contracts.errors import DataLoss, InvalidArgument
from services.generation.engine.types import TensorSpec

_FLOATS = {"F64", "F32", "F16", "BF16"}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# More than this many faults of one kind help nobody.
_MOST_VIOLATIONS = 16
# A safetensors header larger than this is not one.
_MOST_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A complete, checked set of weights in host memory. `checksum` is "sha256:<hex>"."""

    version: int
    checksum: str
    tensors: dict[str, torch.Tensor]


def read_manifest(folder: Path) -> dict[str, TensorSpec]:
    """Return names, shapes and dtypes of a model's tensors, from the headers of its safetensors alone.

    An output head that is tied to the embedding is left out, whether or not the checkpoint has a copy of it.

    Raises:
        InvalidArgument: no such folder, or no safetensors in it.
        DataLoss: a file ends inside its header.
    """
    found: dict[str, TensorSpec] = {}
    for file in _weight_files(folder):
        for name, entry in _header(file).items():
            found[name] = TensorSpec(name, tuple(entry["shape"]), str(entry["dtype"]))
    if _ties_head(folder):
        found.pop(_HEAD, None)
    return found


def stage(
    folder: Path, version: int, expected: Mapping[str, TensorSpec], checksum: str = ""
) -> StagedWeights:
    """Read and check the weights of a policy version.

    Args:
        folder: where the safetensors files are.
        version: the policy version that they will be.
        expected: the manifest of the model that is served.
        checksum: what the sender computed, or "" when it did not.

    Raises:
        InvalidArgument: folder missing, or names, shapes, dtypes or values that cannot be served.
        DataLoss: a file is truncated or corrupt, or the checksum differs.
    """
    digest = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        content = _read(file)
        digest.update(content)
        parsed = _parse(file, content)
        if twice := sorted(tensors.keys() & parsed.keys()):
            raise InvalidArgument(_twice(twice, folder))
        tensors |= parsed
    found = {name: _spec(name, tensor) for name, tensor in tensors.items()}
    computed = f"sha256:{digest.hexdigest()}"
    if checksum and checksum != computed:
        raise DataLoss(f"checksum of {folder} is {computed}, the sender computed {checksum}")
    _drop_tied_head(tensors, found, expected)
    violations = _compare(found, expected) or _nonfinite(tensors)
    if violations:
        raise InvalidArgument(violations)
    return StagedWeights(version, computed, tensors)


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder in name order, the order of the checksum."""
    if not folder.is_dir():
        raise InvalidArgument(
            [Violation("disk.path", f"{folder} is not a folder that this instance can read")]
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidArgument([Violation("disk.path", f"{folder} holds no *.safetensors file")])
    return files


def _header(file: Path) -> dict[str, dict[str, Any]]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        content = stream.read(size) if 0 < size <= _MOST_HEADER_BYTES else b""
    if not content or len(content) != size:
        raise DataLoss(f"{file} is truncated: its safetensors header is incomplete")
    header: dict[str, dict[str, Any]] = json.loads(content)
    header.pop("__metadata__", None)
    return header


def _ties_head(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and bool(json.loads(config.read_bytes()).get("tie_word_embeddings"))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument([Violation("disk.path", f"{file} cannot be read: {error.strerror}")]) from error


def _parse(file: Path, content: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(content)
    except SafetensorError as error:
        raise DataLoss(f"{file} is truncated or corrupt: {error}") from error
    except KeyError as error:
        # A dtype of the format that torch has no name for.
        text = f"{file} has a tensor of dtype {error.args[0]}, allowed are {', '.join(sorted(_FLOATS))}"
        raise InvalidArgument([Violation("disk.path", text)]) from error


def _twice(names: list[str], folder: Path) -> list[Violation]:
    text = f"is in more than one file of {folder}"
    return [Violation(f"tensors[{name}]", text) for name in names[:_MOST_VIOLATIONS]]


_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))


def _drop_tied_head(
    tensors: dict[str, torch.Tensor], found: dict[str, TensorSpec], expected: Mapping[str, TensorSpec]
) -> None:
    """Drop the tied output head that a trainer's state dict names and the checkpoint leaves out."""
    if _HEAD in expected or _HEAD not in tensors or _EMBEDDING not in tensors:
        return
    if torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
        del tensors[_HEAD], found[_HEAD]


def _compare(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> list[Violation]:
    violations = [
        Violation(f"tensors[{name}]", "is missing; the model that is served has it")
        for name in sorted(expected.keys() - found.keys())
    ]
    violations += [
        Violation(f"tensors[{name}]", "is not a tensor of the model that is served")
        for name in sorted(found.keys() - expected.keys())
    ]
    for name in sorted(found.keys() & expected.keys()):
        got, want = found[name], expected[name]
        if got.shape != want.shape:
            text = f"has shape {list(got.shape)}, allowed is {list(want.shape)}"
            violations.append(Violation(f"tensors[{name}]", text))
        elif want.dtype in _FLOATS and got.dtype not in _FLOATS:
            text = f"has dtype {got.dtype}, allowed are {', '.join(sorted(_FLOATS))}"
            violations.append(Violation(f"tensors[{name}]", text))
    return violations[:_MOST_VIOLATIONS]


def _nonfinite(tensors: Mapping[str, torch.Tensor]) -> list[Violation]:
    violations = []
    for name, tensor in tensors.items():
        if not torch.is_floating_point(tensor):
            continue
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            violations.append(Violation(f"tensors[{name}]", f"has {bad} values that are NaN or infinite"))
    return violations[:_MOST_VIOLATIONS]
