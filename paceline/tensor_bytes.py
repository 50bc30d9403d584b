"""Tensors of numpy and torch as what a safetensors file has of them: dtype, shape and little-endian bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_WANTED = "give tensors by name, or pairs of name and tensor"
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


def check(tensors: Any) -> None:
    """Raise ValueError, which names the first tensor that cannot be sent, as far as it is known without reading.

    Of anything but a dict or a list only the type is looked at: it may make each tensor when it is read.
    """
    _pairs(tensors)
    if isinstance(tensors, dict | list | tuple):
        for name, tensor in pairs_of(tensors):
            entry_of(name, tensor)


def pairs_of(tensors: Any, *, in_parts: bool = False) -> Iterator[tuple[str, Any]]:
    """Iterate over names and tensors of a mapping or of an iterable of pairs; ValueError: it is neither.

    Only with `in_parts` may ranks hold parts of a tensor.
    """
    for pair in _pairs(tensors):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"the weights have a {type(pair).__name__}; {_WANTED}")
        if hasattr(pair[1], "full_tensor") and not in_parts:
            raise ValueError(
                f"tensor {pair[0]!r} is a DTensor; give its full_tensor(), or push ShardedTensors"
            )
        # Nothing is held here while the caller has the tensor, which may be large.
        given = [(pair[0], pair[1])]
        del pair
        yield given.pop()


def _pairs(tensors: Any) -> Iterable[Any]:
    """Return what should give pairs. ValueError: it cannot."""
    if callable(getattr(tensors, "state_dict", None)):
        raise ValueError(f"the weights are a {type(tensors).__name__}; give what its state_dict() returns")
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise ValueError(f"the weights are a {type(pairs).__name__}; {_WANTED}")
    return pairs


def entry_of(name: str, tensor: Any) -> Entry:
    """Describe a tensor. ValueError names it: it is none, has no values, or a dtype that the format lacks."""
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise ValueError(
            f"tensor {name!r} is a {type(tensor).__name__}; give a numpy array or a torch tensor"
        )
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"tensor {name!r} has dtype {kind}, which safetensors files cannot hold ({known})")
    if hasattr(tensor, "detach"):
        _check(name, tensor)
        size = tensor.numel() * tensor.element_size()
        return Entry(name, _DTYPES[kind], tuple(tensor.shape), size, lambda: _from_torch(name, tensor, kind))
    return Entry(name, _DTYPES[kind], tensor.shape, tensor.nbytes, lambda: _little_endian(tensor))


def _check(name: str, tensor: Any) -> None:
    """Raise ValueError for a torch tensor whose values are not all here, in order."""
    if str(tensor.device) == "meta":
        raise ValueError(f"tensor {name!r} is on the meta device: it has no values; load the model first")
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"tensor {name!r} has the layout {tensor.layout}; give its to_dense()")


def _from_torch(name: str, tensor: Any, kind: str) -> npt.NDArray[Any]:
    """Return the values of a torch tensor; numpy has no bfloat16, so its bits travel as int16."""
    try:
        tensor = tensor.detach().cpu().resolve_neg().contiguous()
        if kind == "bfloat16":
            import torch  # only a process that has a torch tensor gets here

            tensor = tensor.view(torch.int16)
        return _little_endian(tensor.numpy())
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(f"the values of tensor {name!r} cannot be read: {error}") from error


def _little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    contiguous: npt.NDArray[Any] = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return contiguous
