"""Write and hash safetensors files with numpy alone.

The format: 8 bytes little-endian length of the header, the header in JSON (`name -> dtype, shape,
data_offsets`), padded with spaces to a multiple of 8, then the tensors' bytes one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    load: Callable[[], npt.NDArray[Any]]
    """Loads the values into memory; called for one tensor at a time."""


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors (numpy arrays, or objects with torch's tensor methods) to a file and sync it.

    Raises ValueError naming a tensor whose dtype the format does not have.
    """
    entries = {name: _entry(name, tensor) for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        span = [offset, offset + entry.size]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        offset += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            file.write(entry.load().data.cast("B") if entry.size else b"")
        file.flush()
        os.fsync(file.fileno())


def checksum(folder: Path) -> str:
    """Return `sha256:<hex>` of the safetensors files of a folder in name order; ValueError: it has none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors files in {folder}")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def _entry(name: str, tensor: Any) -> _Entry:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"tensor {name!r} has dtype {kind}, which safetensors files cannot hold ({known})")
    if hasattr(tensor, "detach"):
        size = tensor.numel() * tensor.element_size()
        return _Entry(_DTYPES[kind], tuple(tensor.shape), size, lambda: _from_torch(tensor, kind))
    return _Entry(_DTYPES[kind], tensor.shape, tensor.nbytes, lambda: _little_endian(tensor))


def _from_torch(tensor: Any, kind: str) -> npt.NDArray[Any]:
    """Return the values of a torch tensor; numpy has no bfloat16, so its bits travel as int16."""
    tensor = tensor.detach().cpu().contiguous()
    if kind == "bfloat16":
        import torch  # only a process that has a torch tensor gets here

        tensor = tensor.view(torch.int16)
    return _little_endian(tensor.numpy())


def _little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    contiguous: npt.NDArray[Any] = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return contiguous
