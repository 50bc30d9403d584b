"""Compute kernels, each with a plain reference that defines its result.

Hugging Face's distribution `kernels` has a package of this name too, and transformers imports it where it is
installed. A process can only have one package of a name, and processes of the server find this one first. So it
serves as both: modules and names that are missing here are looked up in that distribution.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

_INIT = "__init__.py"


def _folder_of_hugging_face() -> Path | None:
    try:
        folder = Path(str(distribution("kernels").locate_file("kernels")))
    except PackageNotFoundError:
        return None
    return folder if (folder / _INIT).is_file() and not folder.samefile(Path(__file__).parent) else None


_theirs = _folder_of_hugging_face()
if _theirs is not None:
    __path__.append(str(_theirs))


if not TYPE_CHECKING:  # a misspelt name of ours is found by type checkers

    def __getattr__(name: str) -> Any:
        if _theirs is None or PathFinder.find_spec(f"{__name__}.{name}", __path__) is not None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_hugging_face(_theirs), name)


def _hugging_face(folder: Path) -> ModuleType:
    """Return the module of that distribution's `__init__.py`, which imports a part of the hub's client."""
    name = f"{__name__}._hugging_face"
    if name not in sys.modules:
        spec = spec_from_file_location(name, folder / _INIT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
