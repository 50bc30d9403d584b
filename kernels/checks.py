"""Checks of tensor arguments, with errors that name the argument, what it is and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def check(
    name: str, tensor: torch.Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype]
) -> None:
    """ValueError unless `tensor` has the shape (None: any size) and one of the dtypes."""
    fits = tensor.ndim == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(_name(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed}, got {_name(tensor.dtype)}")


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """ValueError unless all tensors are on `device`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the rest, got {tensor.device}")


def check_contiguous(**tensors: torch.Tensor | None) -> None:
    """ValueError unless the last axis of every tensor is contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"the last axis of {name} must be contiguous, got strides {list(tensor.stride())}"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
