"""New weights for an engine in its own process (see `EngineActor`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file


def push(engine: Any, folder: Path) -> None:
    """Load the weights of a model folder in place."""
    for file in folder.glob("*.safetensors"):
        engine.apply_weights(iter(load_file(file).items()))
