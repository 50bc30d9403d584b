"""How CPU kernels are compiled: strict IEEE arithmetic, without the GIL, the entry cached on disk.

The cache lies beside the source, or where NUMBA_CACHE_DIR says. In a container with a read-only root file
system set NUMBA_CACHE_DIR to a writable volume (or to one filled at image build): numba refuses to
define a cached function when it finds nowhere to write, and then we compile anew in every process.

Numba renews a cached function when its own file changes, but not when the functions and constants that went
into it do. And a process that finds in the index what another one is just about to write gets the file that an
earlier version left under that number. So only entries are cached, each under a name with a fingerprint of all
its sources: no version ever meets the files of another.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Any:
    """A compiled part of an entry: single-threaded, division by zero as IEEE has it."""
    return numba.njit(**_OPTIONS)(function)


def entry(fingerprint: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a compiled function that is called from Python, of sources with this `source_fingerprint`."""

    def compiled(function: Callable[..., Any]) -> Any:
        # What numba names the files after.
        function.__qualname__ += f"_{fingerprint}"
        try:
            return numba.njit(cache=True, **_OPTIONS)(function)
        except RuntimeError as error:
            logging.getLogger(__name__).warning("compiling without a cache (set NUMBA_CACHE_DIR): %s", error)
            return kernel(function)

    return compiled


def source_fingerprint(*folders: Path) -> str:
    """A digest of the Python sources in these folders."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        source = path.read_bytes()
        digest.update(f"{path.name} {len(source)}\n".encode() + source)
    return digest.hexdigest()
