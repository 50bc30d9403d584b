"""Tensors of numpy and torch as what a safetensors file has of them: dtype, shape and little-endian bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensor as a safetensors header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    load: Callable[[], npt.NDArray[Any]]
    """Loads the values into memory; called for one tensor at a time."""


def entry_of(name: str, tensor: Any) -> Entry:
    """Describe a tensor. ValueError: it has a dtype that the format lacks."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"tensor {name!r} has dtype {kind}, which safetensors files cannot hold ({known})")
    if hasattr(tensor, "detach"):
        size = tensor.numel() * tensor.element_size()
        return Entry(name, _DTYPES[kind], tuple(tensor.shape), size, lambda: _from_torch(tensor, kind))
    return Entry(name, _DTYPES[kind], tensor.shape, tensor.nbytes, lambda: _little_endian(tensor))


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
