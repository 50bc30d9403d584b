"""Names of vLLM that the engine relies on, loaded from `symbols.yaml`.

`test_symbols.py` compares them with the installed vLLM and with the imports of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_suffix(".yaml")


class SymbolKind(Enum):
    """Kind of a symbol. An attribute may be set in `__init__` only, or be a field or a property."""

    CALLABLE = "callable"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True)
class Symbol:
    """`path` inside `module`, such as Request.num_tokens; `parameters` are the names that we pass or override."""

    module: str
    path: str
    why: str
    kind: SymbolKind = SymbolKind.CALLABLE
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VllmSymbols:
    """Part of vLLM that the engine uses: a minor `version`, `environment` variables with reasons, and symbols."""

    version: str
    environment: dict[str, str]
    symbols: tuple[Symbol, ...]


def load_symbols(path: Path = _FILE) -> VllmSymbols:
    """Read and check the list. ValueError names an entry that is incomplete or has an unknown field."""
    data = yaml.safe_load(path.read_text())
    found = [
        symbol
        for modules in data["symbols"].values()
        for module, entries in modules.items()
        for entry in entries
        for symbol in _symbols(module, entry)
    ]
    return VllmSymbols(data["version"], data["environment"], tuple(found))


def _symbols(module: str, entry: dict[str, Any]) -> list[Symbol]:
    fields = dict(entry)
    why = fields.pop("why", "")
    parameters = tuple(fields.pop("parameters", ()))
    owner, attributes = fields.pop("owner", ""), fields.pop("attributes", [])
    path = fields.pop("callable", "")
    if fields or not why or bool(path) == bool(attributes) or (path and owner) or (attributes and parameters):
        raise ValueError(f"symbols.yaml: {module}: an entry needs why and callable or attributes: {entry}")
    if path:
        return [Symbol(module, path, why, parameters=parameters)]
    names = [f"{owner}.{name}" if owner else name for name in attributes]
    return [Symbol(module, name, why, SymbolKind.ATTRIBUTE) for name in names]
