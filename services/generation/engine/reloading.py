"""Find layers into which vLLM has loaded no new weights.

vLLM replaces weights layer by layer, as each layer's loader is called. The loaders of some models write past it,
and it then puts the old weights back: GPT-OSS keeps its experts and sinks. It says so in its log only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
MESSAGE = "%s: Failed to load weights"
"""vLLM's line, with the class of a layer."""


class StaleLayers(RuntimeError):
    """Layers that still have old weights; the engine must not serve."""


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the class of a layer."""
        if record.msg == MESSAGE and isinstance(record.args, tuple):
            self.names.add(str(record.args[0]))


@contextmanager
def stale_layers() -> Iterator[set[str]]:
    """Collect the classes of layers that vLLM leaves as they were within the context."""
    listener, logger = _Listener(), logging.getLogger(LOGGER)
    level = logger.level
    logger.addHandler(listener)
    if not logger.isEnabledFor(logging.WARNING):
        logger.setLevel(logging.WARNING)
    try:
        yield listener.names
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def check_layers(model: nn.Module, stale: set[str]) -> None:
    """Raise StaleLayers if a layer of these classes has weights of its own.

    Others have none but those of another layer, such as a tied head, or tables that are computed, such as those of
    rotary positions.
    """
    layers = list(model.modules())
    loaded = {id(each) for layer in layers if type(layer).__name__ not in stale for each in _weights(layer)}
    wrong = {
        type(layer).__name__
        for layer in layers
        if type(layer).__name__ in stale and any(id(each) not in loaded for each in _weights(layer))
    }
    if wrong:
        raise StaleLayers(
            f"vLLM cannot load new weights into {', '.join(sorted(wrong))}, and has left the old ones"
        )


def _weights(layer: nn.Module) -> Iterator[nn.Parameter]:
    return layer.parameters(recurse=False)
