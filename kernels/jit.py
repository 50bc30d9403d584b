"""Compile numba functions for the CPU: strict IEEE arithmetic, without the GIL, entries cached on disk.

Shared by everything that compiles with numba: the CPU kernels here, and the suffix index and planners of services.

The cache is next to the source, or in NUMBA_CACHE_DIR. In a container with a read-only root file
system set NUMBA_CACHE_DIR to a writable volume (or to one filled at image build): numba refuses to
define a cached function without a writable place, and then every process compiles again.

Numba invalidates a cached function when its own file changes, but not when functions and constants that it uses
do. A process that reads the index while another one writes it may also load a file of an earlier version. So only
entries are cached, each under a name with a fingerprint of all its sources: no version uses the files of another.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a part of an entry: single-threaded, division by zero as in IEEE 754."""
    return numba.njit(**_OPTIONS)(function)


def entry(fingerprint: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that is called from Python, and cache it under this `source_fingerprint`."""

    def compiled(function: Callable[..., Any]) -> Any:
        # Numba derives the file names from it.
        function.__qualname__ += f"_{fingerprint}"
        try:
            return numba.njit(cache=True, **_OPTIONS)(function)
        except RuntimeError as error:
            logging.getLogger(__name__).warning("compiling without a cache (set NUMBA_CACHE_DIR): %s", error)
            return kernel(function)

    return compiled


def source_fingerprint(*sources: Path) -> str:
    """Return a digest of these Python sources, and of all in these folders."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (
        path for each in sources for path in ([each] if each.is_file() else sorted(each.glob("*.py")))
    ):
        source = path.read_bytes()
        digest.update(f"{path.name} {len(source)}\n".encode() + source)
    return digest.hexdigest()
