"""Let vLLM's V2 runner compute on CPU, by Triton's interpreter: so it is tested where there is no GPU.

V2's bookkeeping is a dozen Triton kernels. vLLM takes Triton for missing on CPU unless there is a backend named
"cpu", which the released Triton has not; with one that says it is active, vLLM defines its kernels, and the
interpreter runs them as NumPy. That is slow, and nothing that serves should use it.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any


class _Driver:
    """Driver of a backend that compiles nothing."""

    @staticmethod
    def is_active() -> bool:
        """Return True: vLLM counts the drivers that are."""
        return True


def is_installed() -> bool:
    """Return whether `install` was called in this process, or in the one that it was forked from."""
    if "triton" not in sys.modules:
        return False
    from triton import backends  # type: ignore[import-untyped]

    return getattr(backends.backends.get("cpu"), "driver", None) is _Driver


def install() -> None:
    """Make Triton's interpreter the backend of this process. Call it before Triton and vLLM are imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    # torch would ask the backend what to compile for.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from triton import backends
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        """Return a mask of booleans: `&` of two scalars leaves integers, with which NumPy would index."""
        return (
            mask if mask.data.dtype == bool else interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
        )

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, boolean(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, boolean(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
