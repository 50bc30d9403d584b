"""Manifest of the model that is served: the tensors that an update must have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path

import torch

from paceline.foreign_json import read_object
from services.contracts.errors import DataLoss
from services.generation.engine.types import TensorSpec
from services.generation.weights.shards import (
    FLOATS,
    MappedTensors,
    WeightShard,
    open_shard,
    read_header,
    weight_files,
)

HEAD = "lm_head.weight"
"""Output head, where a model has one that may be tied to the embedding of its input."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_BLOCK_ROWS = 4096
# The widest number, and what a file has beside a tensor's numbers, with room to spare.
_NUMBER_BYTES, _TENSOR_BYTES, _SPARE_BYTES = 8, 128 << 10, 64 << 20


def read_manifest(folder: Path, dtype: str = "", ties_head: bool | None = None) -> dict[str, TensorSpec]:
    """Return names, shapes and dtypes of a model's tensors, from the headers of its safetensors.

    An output head that is tied to the embedding is left out, whether or not the checkpoint has a copy of it. As in
    vLLM, a head that differs from the embedding is not tied, whatever the configuration says.

    Args:
        folder: of the model.
        dtype: in which the engine has the floats, such as bfloat16; "": as they are stored.
        ties_head: what the engine's configuration says of the head; None: what config.json says.

    Raises:
        InvalidArgument: no such folder, or no safetensors in it.
        DataLoss: a file ends inside its header, or config.json is corrupt.
    """
    served = next((code for code, each in FLOATS.items() if str(each) == f"torch.{dtype}"), "")
    found: dict[str, TensorSpec] = {}
    files: dict[str, Path] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file)[1].items():
            stored = str(entry["dtype"])
            kept = served if stored in FLOATS else ""
            found[name] = TensorSpec(name, tuple(entry["shape"]), stored, kept)
            files[name] = file
    if ties_head is None:
        ties_head = _ties_head(folder / "config.json")
    embedding = embedding_of(found)
    if ties_head and HEAD in found:
        names = (HEAD, embedding) if embedding else ()
        if not names or same_tensor({name: open_shard(files[name], "") for name in names}, *names, served):
            del found[HEAD]
    return found


def most_bytes(expected: Iterable[TensorSpec]) -> int:
    """Return how many bytes the files of a version have at most, however its numbers are stored."""
    each = (_NUMBER_BYTES * prod(tensor.shape) + _TENSOR_BYTES for tensor in expected)
    return sum(each) + _SPARE_BYTES


def _ties_head(config: Path) -> bool:
    if not config.is_file():
        return False
    try:
        return bool(read_object(config).get("tie_word_embeddings"))
    except (OSError, ValueError) as error:
        raise DataLoss(f"{config} is corrupt: {error}") from error


def embedding_of(names: Collection[str]) -> str:
    """Return the name of the embedding to which a head may be tied; "" if there is none, or more than one."""
    found = [name for name in names if name.endswith(_EMBEDDINGS)]
    return found[0] if len(found) == 1 else ""


def same_tensor(placed: Mapping[str, WeightShard], one: str, other: str, served: str = "") -> bool:
    """Return True if two tensors are equal, as they are loaded."""
    tensors = MappedTensors(placed)
    left, right = tensors[one], tensors[other]
    if left.shape != right.shape or (not served and left.dtype != right.dtype):
        return False
    dtype = FLOATS.get(served, left.dtype)
    # Not one copy of all: an embedding may be gigabytes.
    return all(
        torch.equal(left[row : row + _BLOCK_ROWS].to(dtype), right[row : row + _BLOCK_ROWS].to(dtype))
        for row in range(0, max(1, left.shape[0] if left.ndim else 1), _BLOCK_ROWS)
    )
