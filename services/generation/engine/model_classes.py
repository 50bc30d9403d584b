"""Import the classes of models before vLLM inspects them.

vLLM inspects a class in a process of its own, lest the import starts CUDA, and keeps the result in a cache of the
user. On CPU nothing can start CUDA, and the class is needed here anyway: that process, which imports all of vLLM
once more, would double the time of an instance's first start on a machine or in a container.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from vllm.model_executor.models.registry import ModelRegistry

from paceline.foreign_json import read_object


def import_model_classes(model: str) -> None:
    """Register the classes that a model folder names. Those that vLLM cannot import are left to its own errors."""
    config = Path(model) / "config.json"
    if not config.is_file():
        return
    for architecture in read_object(config).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            with suppress(ImportError):
                ModelRegistry.register_model(architecture, known.load_model_cls())
