"""Run a generation instance of the weights benchmark: the real service, with a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import services.generation.build as composition
from bench.weights.models import LENGTH, VOCABULARY, tensors_of
from services.generation.__main__ import serve
from services.generation.build import build_drafts
from services.generation.config import GenerationConfig
from services.generation.engine.model_support import ModelSupport
from services.generation.engine.types import EngineLoad
from services.generation.kv_transfer.block_store import UnsupportedCaches
from services.platform.service import run


class CopyingEngine:
    """Stand-in for an engine: holds a model in memory, and applies weights by copying them into it.

    It generates nothing, and leaves out the work of vLLM's engine around the copy when weights are applied.
    """

    def __init__(self, model: Path) -> None:
        """Load the weights of a folder."""
        import torch

        from services.contracts.sampling import ModelLimits

        torch.set_num_threads(1)
        self.support = ModelSupport()
        self.limits = ModelLimits(vocab_size=VOCABULARY, max_model_len=LENGTH)
        self.device = self.hardware = self.attention = "none"
        self.dtype = "float32"
        self.max_running, self.ties_head = 1, True
        self.asleep = False
        self.has_work = self.in_flight = False
        self.load = EngineLoad(0, 0, 0.0)
        self.graph_sizes = self.failed_kernels = ()
        self.model_drafts: dict[str, Any] = {}
        self.migration = _NoMoves()
        self._weights = tensors_of(model)

    def apply_weights(
        self, tensors: Iterable[tuple[str, Any]], *, preempt: bool = False, keep: Collection[str] = ()
    ) -> int:
        """Copy tensors into the existing ones of the same names; there is no KV to drop."""
        for name, tensor in tensors:
            self._weights[name].copy_(tensor)
        return 0

    def abort(self, sample_ids: Iterable[str]) -> None:
        """Do nothing, because there are no samples."""

    def shutdown(self) -> None:
        """Do nothing, because there is nothing to release."""


class _NoMoves:
    """Moves of an engine that has no KV."""

    def __init__(self) -> None:
        self.on_withdrawn: Callable[[str], None] = lambda _: None

    def open_ports(self, *_: object) -> None:
        raise UnsupportedCaches("the engine has no KV")


def main() -> None:
    """Serve as `python -m services.generation` does, with the stand-in."""

    def copying(config: GenerationConfig, metrics: Any, origin_of: Any) -> tuple[Any, Any]:
        engine: Any = CopyingEngine(Path(config.model))
        return engine, build_drafts(config, engine, metrics, origin_of)

    composition.build_engine = copying
    run("generation", serve, GenerationConfig)


if __name__ == "__main__":
    main()
