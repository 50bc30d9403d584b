"""Engines with a quantized copy, a process each for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.generation.engine.types import EngineOptions, W4Options
from tests.support.models import tiny_model
from tests.support.remote_engine import RemoteEngine

DEPTH = 6
OPTIONS = EngineOptions(
    model="",
    dtype="float32",
    max_num_seqs=32,
    max_model_len=192,
    block_size=32,
    quantized=W4Options(group=32, most_tokens=DEPTH),
)
# 3 layers x 32 tokens x 2 heads x 32 x (key, value) x 4 bytes.
BLOCK_BYTES = 3 * 32 * 2 * 32 * 2 * 4


@dataclass(frozen=True, slots=True)
class Bench:
    """A running engine and the folder of its model."""

    engine: RemoteEngine
    model: Path


@pytest.fixture(scope="package")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen3 in float32, multiplied by torch's 4-bit kernel, with too little KV for 16 long samples."""
    model = tiny_model(tmp_path_factory.mktemp("model") / "qwen3")
    options = EngineOptions(
        **{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}
        | {"model": str(model), "kv_cache_memory_bytes": 40 * BLOCK_BYTES}
    )
    with RemoteEngine(options) as engine:
        yield Bench(engine, model)


@pytest.fixture(scope="package")
def sixteen_bits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen2, which has biases, in bfloat16, where the quantized copy multiplies with vLLM's kernel."""
    model = tiny_model(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")
    options = EngineOptions(
        **{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}
        | {"model": str(model), "dtype": "bfloat16", "kv_cache_memory_bytes": 100 * BLOCK_BYTES}
    )
    with RemoteEngine(options) as engine:
        yield Bench(engine, model)
