"""Run a generation instance of the weights benchmark: the real service, with one of two engines.

copying: the stand-in `CopyingEngine`; vllm: the real engine, which records the times of steps and weights in a
file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import services.generation.build as composition
from services.generation.__main__ import serve
from services.generation.build import build_drafts
from services.generation.config import GenerationConfig
from services.generation.engine.model_support import ModelSupport
from services.generation.engine.types import EngineLoad
from services.generation.kv_transfer.block_store import UnsupportedCaches
from services.platform.service import run

ENGINE, TIMES = "BENCH_WEIGHTS_ENGINE", "BENCH_WEIGHTS_TIMES"
"""Environment variables: the engine's name, and the file for the times of vLLM's engine."""
COPYING, VLLM = "copying", "vllm"
_VOCABULARY, _LENGTH = 4096, 2048
T = TypeVar("T")


class CopyingEngine:
    """Stand-in for an engine: holds a model in memory, and applies weights by copying them into it.

    It generates nothing, and leaves out the work of vLLM's engine around the copy when weights are applied.
    """

    def __init__(self, model: Path) -> None:
        """Load the weights of a folder."""
        import torch
        from safetensors.torch import load_file

        from services.contracts.sampling import ModelLimits

        torch.set_num_threads(1)
        self.support = ModelSupport()
        self.limits = ModelLimits(vocab_size=_VOCABULARY, max_model_len=_LENGTH)
        self.device = self.hardware = self.attention = "none"
        self.dtype = "float32"
        self.max_running, self.ties_head = 1, True
        self.asleep = False
        self.has_work = self.in_flight = False
        self.load = EngineLoad(0, 0, 0.0)
        self.graph_sizes = self.failed_kernels = ()
        self.model_drafts: dict[str, Any] = {}
        self.migration = _NoMoves()
        self._weights = {
            name: tensor.clone()
            for path in sorted(model.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }

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
    """Serve as `python -m services.generation` does, with the engine that the environment names."""
    real = composition.build_engine

    def copying(config: GenerationConfig, metrics: Any, origin_of: Any) -> tuple[Any, Any]:
        engine: Any = CopyingEngine(Path(config.model))
        return engine, build_drafts(config, engine, metrics, origin_of)

    def timed(config: GenerationConfig, metrics: Any, origin_of: Any) -> tuple[Any, Any]:
        engine, drafts = real(config, metrics, origin_of)
        # Write line by line, for readers while this process runs.
        times = Path(os.environ[TIMES]).open("a", buffering=1)  # noqa: SIM115 (open to the end of the process)
        engine.step = _timed("step", engine.step, times)
        engine.apply_weights = _timed("apply", engine.apply_weights, times)
        return engine, drafts

    composition.build_engine = copying if os.environ[ENGINE] == COPYING else timed
    run("generation", serve, GenerationConfig)


def _timed(name: str, method: Callable[..., T], times: TextIO) -> Callable[..., T]:
    def call(*args: Any, **options: Any) -> T:
        began = time.monotonic()
        result = method(*args, **options)
        times.write(f"{name} {began!r} {time.monotonic()!r}\n")
        return result

    return call


if __name__ == "__main__":
    main()
