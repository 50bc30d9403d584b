"""How CPU kernels are compiled: strict IEEE arithmetic, without the GIL, cached on disk.

The cache lies beside the source, or where NUMBA_CACHE_DIR says. In a container with a read-only root file
system set NUMBA_CACHE_DIR to a writable volume (or to one filled at image build): numba refuses to
define a cached function when it finds nowhere to write, and then we compile anew in every process.
"""

import logging
from collections.abc import Callable
from typing import Any

import numba

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Any:
    """A compiled kernel: single-threaded (the engine owns one core), division by zero as IEEE has it."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:
        logging.getLogger(__name__).warning("compiling without a cache (set NUMBA_CACHE_DIR): %s", error)
        return numba.njit(**_OPTIONS)(function)
