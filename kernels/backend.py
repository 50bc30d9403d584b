"""Backend of all kernels: Triton, or the plain reference that defines the result; and checks of arguments.

`use` sets it for the process (the engine does, from its configuration); each entry function takes `backend` to
override it for one call. AUTO is Triton on CUDA tensors where Triton is installed, and the reference elsewhere.
Nothing here imports Triton before a call needs it, and kernels read no environment variable of their own.

Triton's interpreter (TRITON_INTERPRET=1, set before Triton is first imported) runs the kernels on CPU tensors,
many times slower. Tests without a GPU use it; only an explicit TRITON selects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from importlib.util import find_spec

import torch


class Backend(StrEnum):
    """Implementation of the kernels."""

    AUTO = "auto"
    TRITON = "triton"
    REFERENCE = "reference"


class BackendUnavailable(ValueError):
    """The requested backend cannot run on these tensors."""


class KernelMismatch(RuntimeError):
    """The result of a kernel differs from the reference's."""


_chosen = Backend.AUTO


def use(backend: Backend | str) -> None:
    """Set the default backend of this process. ValueError for an unknown name."""
    global _chosen
    _chosen = _named(backend)


def in_use() -> Backend:
    """Return the backend that `use` set last; AUTO before."""
    return _chosen


def choose(device: torch.device, backend: Backend | str | None = None) -> Backend:
    """Return TRITON or REFERENCE for tensors on `device`. BackendUnavailable if TRITON cannot run."""
    wanted = _chosen if backend is None else _named(backend)
    if wanted is Backend.REFERENCE:
        return wanted
    if wanted is Backend.AUTO:
        return Backend.TRITON if device.type == "cuda" and installed() else Backend.REFERENCE
    if not installed():
        raise BackendUnavailable("backend triton: Triton is not installed; allowed here: auto, reference")
    if device.type != "cuda" and not interpreted():
        raise BackendUnavailable(
            f"backend triton: the tensors are on {device}, Triton needs cuda (or TRITON_INTERPRET=1, for tests); "
            "allowed here: auto, reference"
        )
    return wanted


@cache
def installed() -> bool:
    """Return True if Triton can be imported, without importing it."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Return True if Triton runs kernels in its interpreter. Imports Triton."""
    import triton  # type: ignore[import-untyped]

    return bool(triton.knobs.runtime.interpret)


def _named(backend: Backend | str) -> Backend:
    try:
        return Backend(backend)
    except ValueError:
        raise ValueError(f"backend must be one of {', '.join(Backend)}, got {backend!r}") from None


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def check(
    name: str, tensor: torch.Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype]
) -> None:
    """Raise ValueError unless `tensor` has the shape (None: any size) and one of the dtypes."""
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
    """Raise ValueError unless all tensors are on `device`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the rest, got {tensor.device}")


def check_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless the last axis of every tensor is contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"the last axis of {name} must be contiguous, got strides {list(tensor.stride())}"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
