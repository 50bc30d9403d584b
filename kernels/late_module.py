"""A module that is imported at its first use: numba must come after vLLM, which no importer of ours should know."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LateModule:
    """Stands for the module `name` of compiled functions. Each function is looked up once, because steps wait."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found
