"""Build the engines that are compared, each in a separate process, and their models with random weights.

An engine draws the weights on its own device; only a config file is written. vLLM's own dummy weights are within a
thousandth of zero, norms included, and give nearly flat logits. Tokens would then not distinguish a wrong
computation from a right one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu.sizes import EngineKind, Graphs
from services.generation.engine.environment import choose_invariance, choose_runner
from services.generation.engine.types import Eagle3Options, EngineOptions, W4Options
from services.step_time.machine import on_cpu

LOAD_FORMAT = "paceline_random"
_SPREAD = 1.5
"""Standard deviation of a matrix's entries, times the square root of its columns."""
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_cache": True,
}


def _shape(
    hidden: int,
    inner: int,
    heads: int,
    layers: int,
    *,
    tied: bool,
    kv_heads: int = 8,
    vocabulary: int = 151_936,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40_960,
        "dtype": "bfloat16",
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "q17": _shape(2048, 6144, 16, 28, tied=True),
    "q8": _shape(4096, 12_288, 32, 36, tied=False),
    "tiny": {
        **_shape(128, 256, 2, 2, tied=True, kv_heads=1, vocabulary=512),
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "dtype": "float32",
    },
}
"""Configs by name: Qwen3-1.7B, Qwen3-8B, and a tiny model for a CPU."""
PREFILL = {"q17": 60_000, "q8": 20_000, "tiny": 10_000}
"""Estimated prefill speed in tokens a second; other models use the value of q8."""


def model_folder(given: str, made: Path) -> tuple[Path, str]:
    """Return the folder of a model, and the load format that vLLM is to use.

    Args:
        given: a name in `SHAPES`, or a folder with a config.json. If the folder also has weights, they are loaded,
            otherwise random ones are drawn.
        made: folder for the config of a named shape.

    Raises:
        ValueError: it is neither.
    """
    if given in SHAPES:
        made.mkdir(parents=True, exist_ok=True)
        (made / "config.json").write_text(json.dumps({**_QWEN3, **SHAPES[given]}, indent=1) + "\n")
        return made, LOAD_FORMAT
    folder = Path(given)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {given}: must be a folder with a config.json, or one of {', '.join(SHAPES)}"
        )
    return folder, "auto" if any(folder.glob("*.safetensors")) else LOAD_FORMAT


def register_random_weights() -> None:
    """Register the load format of random weights in this process's vLLM. Imports vLLM."""
    import torch
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    class RandomWeights(BaseModelLoader):
        """Draw every matrix from a fixed seed per matrix, equal in all engines. Norms are 1, biases 0."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing, because there is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill the parameters in place."""
            for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
                fill(name, parameter.data, seed)
            if hasattr(model, "has_own_lm_head"):
                # Otherwise vLLM would use the model's, which is four times as wide.
                model.has_own_lm_head = True  # type: ignore[assignment]

    def fill(name: str, values: torch.Tensor, seed: int) -> None:
        if not values.is_floating_point():
            return
        if values.ndim < 2:
            values.fill_(0 if name.endswith("bias") else 1)
            return
        generator = torch.Generator(device=values.device).manual_seed(seed)
        values.normal_(0, _SPREAD * values.shape[-1] ** -0.5, generator=generator)

    register_model_loader(LOAD_FORMAT)(RandomWeights)


def random_head(target: Mapping[str, Any], folder: Path) -> Path:
    """Return a checkpoint of an EAGLE-3 head with random weights for a model of this config; reuse one that fits.

    It costs as much as a trained head, and almost none of its drafts are accepted. It has the first 32,000 tokens
    of the vocabulary.
    """
    import torch

    from services.contracts.drafter_checkpoint import SIZES, folder_of, read_config, save, shapes
    from services.drafter.learning.head import HeadShape

    layers, vocabulary = target["num_hidden_layers"], target["vocab_size"]
    rows = min(32_000, vocabulary)
    sizes = {name: target[name] for name in SIZES if name != "draft_vocab_size"}
    config = HeadShape(
        **sizes,
        draft_vocab_size=rows,
        layers=tuple(sorted({max(1, min(layer, layers - 1)) for layer in (2, layers // 2, layers - 3)})),
        eps=1e-6,
        rope_theta=1e6,
        max_positions=target["max_position_embeddings"],
    ).config()
    made = folder_of(folder, 1)
    if made.is_dir() and read_config(made) == config:
        return made
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config).items():
        matrix = len(shape) == 2
        tensors[name] = _SPREAD * torch.randn(shape) * shape[1] ** -0.5 if matrix else torch.ones(shape)
    if rows < vocabulary:
        tensors["d2t"] = torch.zeros(rows, dtype=torch.int64)
        tensors["t2d"] = torch.arange(vocabulary) < rows
    dtype = getattr(torch, target["dtype"])
    floats = {name: each.to(dtype) for name, each in tensors.items() if each.is_floating_point()}
    return save(folder, 1, config, tensors | floats).path


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

    `load_format` is one of vLLM's, or the format of random weights. Heads are written to the folder
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
        from bench.gpu.engines.setup import register_random_weights

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
    from bench.gpu.engines.setup import random_head

    config = json.loads((setup.model / "config.json").read_text())
    return random_head(config, setup.made)
