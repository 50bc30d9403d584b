"""Build the engines that are compared, each in a separate process."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu.sizes import EngineKind, Graphs
from services.generation.engine.environment import choose_invariance, choose_runner
from services.generation.engine.types import Eagle3Options, EngineOptions, W4Options
from services.step_time.machine import on_cpu

_START_SECONDS = {Graphs.FULL: 50.0, Graphs.DEFAULT: 90.0, Graphs.NONE: 30.0}
"""Estimated seconds until an engine is built and its graphs are captured."""
_MOST_DRAFTED = 8
_STOCK_DRAFTED = 3
"""Draft tokens of a step, as in vLLM's documentation of EAGLE-3."""
_STOCK_NGRAM_DRAFTED = 5
"""The same of n-gram drafts; vLLM has no default for them."""
STOCK = (EngineKind.STOCK, EngineKind.STOCK_EAGLE3, EngineKind.STOCK_NGRAM, EngineKind.STOCK_SUFFIX)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Engine, the model that it serves, its number type ("auto": the model's), graphs, and its limits.

    `load_format` is one of vLLM's, or the format of random weights (model.py). Heads are written to the folder
    `made`.
    """

    kind: EngineKind
    model: Path
    load_format: str
    dtype: str
    graphs: Graphs
    max_num_seqs: int
    max_model_len: int
    made: Path
    draft_window: int = 0
    kv_bytes: int | None = None

    @property
    def on_v2(self) -> bool:
        """Return True if vLLM's V2 runner must be chosen before vLLM is imported."""
        return self.kind in (EngineKind.V2, EngineKind.AHEAD)

    @property
    def start_seconds(self) -> float:
        """Estimated seconds until the engine is built."""
        return 1.0 if self.absent else _START_SECONDS[self.graphs]

    @property
    def absent(self) -> str:
        """Package that this engine needs and this machine does not have; "" if it has all."""
        lacks = self.kind is EngineKind.STOCK_SUFFIX and find_spec("arctic_inference") is None
        return "arctic-inference" if lacks else ""

    def orders(self) -> Any:
        """Build the engine in this process, which must not have imported vLLM yet; return its orders."""
        if self.absent:
            return AbsentOrders(f"needs {self.absent}, which is not installed")
        if self.kind not in STOCK:
            choose_invariance(self.kind is EngineKind.INVARIANT)
            choose_runner("v2" if self.on_v2 else "v1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from bench.gpu.engines.model import register_random_weights

        register_random_weights()
        engine = _stock(self) if self.kind in STOCK else _ours(self)
        from bench.gpu.engines.orders import EngineOrders

        return EngineOrders(engine, (self.kind, self.graphs))


class AbsentOrders:
    """Orders of an engine that cannot be built on this machine, for a known reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def replay(self, **_: Any) -> dict[str, Any]:
        """Return the reason."""
        return {"skipped": self._reason}


def compilation(graphs: Graphs) -> dict[str, Any] | None:
    """Return vLLM's compilation_config for a choice of graphs; None for vLLM's default."""
    if graphs is Graphs.FULL:
        return {"mode": 0, "cudagraph_mode": "FULL"}
    return {"mode": 0, "cudagraph_mode": "NONE"} if graphs is Graphs.NONE else None


def _stock(setup: EngineSetup) -> Any:
    from bench.gpu.engines.driving import StockVllm

    if find_spec("flashinfer") is None:
        # vLLM's sampler would import it by default, and no engine could be built.
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    chosen: dict[str, Any] = {
        "kv_cache_memory_bytes": setup.kv_bytes,
        "compilation_config": None if on_cpu() else compilation(setup.graphs),
    }
    if setup.kind is not EngineKind.STOCK:
        chosen["speculative_config"] = _speculation(setup)
        if on_cpu():
            _repair_verification()
    return StockVllm(
        model=str(setup.model),
        tokenizer=str(setup.model),
        load_format=setup.load_format,
        dtype=setup.dtype,
        max_num_seqs=setup.max_num_seqs,
        max_model_len=setup.max_model_len,
        # Otherwise it would compile for minutes.
        enforce_eager=on_cpu(),
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _speculation(setup: EngineSetup) -> dict[str, Any]:
    """Return vLLM's speculative_config for a kind, with vLLM's defaults."""
    if setup.kind is EngineKind.STOCK_SUFFIX:
        return {"method": "suffix"}
    if setup.kind is EngineKind.STOCK_NGRAM:
        # Its kind for GPUs works with asynchronous scheduling.
        method = "ngram" if on_cpu() else "ngram_gpu"
        return {"method": method, "num_speculative_tokens": _STOCK_NGRAM_DRAFTED}
    head = str(_head(setup))
    return {"method": "eagle3", "model": head, "num_speculative_tokens": _STOCK_DRAFTED}


def _repair_verification() -> None:
    """Let stock vLLM verify with the temperatures of its requests on CPU, too (vllm#55005)."""
    from vllm.v1.sample import rejection_sampler

    from bench.rollout.told_tokens import expand_batch_to_tokens

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _ours(setup: EngineSetup) -> Any:
    from services.generation.engine.core import Engine

    eagle3 = None
    if setup.kind is EngineKind.EAGLE3:
        eagle3 = Eagle3Options(str(_head(setup)), most_tokens=_MOST_DRAFTED)
    options = EngineOptions(
        model=str(setup.model),
        load_format=setup.load_format,
        dtype=setup.dtype,
        max_num_seqs=setup.max_num_seqs,
        max_model_len=setup.max_model_len,
        kv_cache_memory_bytes=setup.kv_bytes,
        block_size=32 if setup.kv_bytes else None,
        engine="v2" if setup.on_v2 else "v1",
        schedule_ahead=setup.kind is EngineKind.AHEAD,
        draft_window=setup.draft_window,
        batch_invariant=setup.kind is EngineKind.INVARIANT,
        compilation_config=None if on_cpu() else compilation(setup.graphs),
        trees=setup.kind is EngineKind.TREES,
        quantized=W4Options(most_tokens=_MOST_DRAFTED) if setup.kind is EngineKind.QUANTIZED else None,
        eagle3=eagle3,
    )
    return Engine(options)


def _head(setup: EngineSetup) -> Path:
    """Return an EAGLE-3 head with random weights for the model of a setup."""
    from bench.gpu.engines.model import random_head

    config = json.loads((setup.model / "config.json").read_text())
    return random_head(config, setup.made)
