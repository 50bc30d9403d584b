"""What Numba has compiled beside the sources, as a folder of its own, which containers have for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.compiled import SOURCES


def copied(folder: Path) -> Path:
    """Return a /cache with what is compiled in this checkout, so that no container compiles it again."""
    from numba.core.caching import _CacheLocator

    root = Path(__file__).parents[3]
    for source in SOURCES:
        for file in (root / source).rglob("__pycache__/*.nb[ci]"):
            place = _CacheLocator.get_suitable_cache_subpath(str(file.parents[1] / "any.py"))
            target = folder / "numba" / place
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
    folder.mkdir(exist_ok=True)
    return folder
