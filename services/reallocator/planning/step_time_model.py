"""Step-time model of an instance that is not measured yet: a roofline by the sizes of its model. Pure.

A step has a row (verified token) for each sample. Its dense layers read the weights and compute with each row; its
attention reads the KV cache and computes with each row and the tokens before it. Each of the two takes as long as
the longer of its memory and compute time. Only the shape counts: measured steps set the scale (see `throughput`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from paceline.foreign_json import read_object

# Of an unmeasured machine: modest, with the memory of a CPU or a small GPU.
_THROUGHPUT, _BANDWIDTH, _BASE, _PER_ROW = 1e12, 5e10, 2e-3, 4e-5
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIXTURE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnsupportedArchitecture(ValueError):
    """Raised for a model that is no dense transformer, or whose config lacks its sizes."""


class Architecture(BaseModel):
    """Memory traffic and compute of a forward pass, in bytes and floating-point operations."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    weight_bytes: float = Field(gt=0)
    """Weights that every step reads, the head included, the embedding not."""
    kv_bytes: float = Field(gt=0)
    """KV of one token in all layers."""
    dense_flops: float = Field(gt=0)
    """Projections and head, for each row."""
    attention_flops: float = Field(gt=0)
    """Attention, for each row and token before it."""

    @classmethod
    def of(cls, config: Mapping[str, Any], value_bytes: int) -> Self:
        """Return the architecture of a Hugging Face config, with `value_bytes` per weight and KV value.

        Raises:
            UnsupportedArchitecture: a mixture of experts, or a config without the sizes of a dense model.
        """
        if any(config.get(key) for key in _MIXTURE_KEYS):
            raise UnsupportedArchitecture("a mixture of experts has no step-time model")
        hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
        heads = _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", heads)
        width = _size(config, "head_dim", hidden // heads)
        attention = 2 * hidden * width * (heads + kv_heads)
        layer = attention + 3 * hidden * _size(config, "intermediate_size")
        weights = layers * layer + hidden * _size(config, "vocab_size")
        return cls(
            weight_bytes=weights * value_bytes,
            kv_bytes=2 * layers * kv_heads * width * value_bytes,
            dense_flops=2 * weights,
            attention_flops=4 * layers * heads * width,
        )


class StepTime(BaseModel):
    """Time of a step in seconds, by samples, rows and context (the sum of the samples' lengths, in tokens)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Architecture
    throughput: float = Field(default=_THROUGHPUT, gt=0)
    bandwidth: float = Field(default=_BANDWIDTH, gt=0)
    base: float = Field(default=_BASE, ge=0)
    per_row: float = Field(default=_PER_ROW, ge=0)

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Return the predicted time; the arguments broadcast. A step without rows takes no time."""
        n, r, c = (np.asarray(each, np.float64) for each in (requests, rows, context))
        of = self.architecture
        dense = np.maximum(of.weight_bytes / self.bandwidth, r * of.dense_flops / self.throughput)
        row = of.attention_flops * c / np.maximum(n, 1.0) / self.throughput
        attention = np.maximum(of.kv_bytes * c / self.bandwidth, r * row)
        return np.asarray((dense + attention + self.base + self.per_row * r) * (r > 0))


def architecture_of(model: Path, dtype: str) -> Architecture:
    """Return the architecture of a model folder in Hugging Face layout.

    Raises:
        UnsupportedArchitecture: no dense model, a config that cannot be read, or a dtype of unknown size.
    """
    if dtype not in _VALUE_BYTES:
        raise UnsupportedArchitecture(f"the size of {dtype} is not known")
    try:
        config = read_object(model / "config.json")
    except (OSError, ValueError) as error:
        raise UnsupportedArchitecture(f"{model} has no config to read: {error}") from error
    return Architecture.of(config, _VALUE_BYTES[dtype])


def _size(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    found = config.get(name)
    if found is None:
        found = otherwise
    if not isinstance(found, int) or found < 1:
        raise UnsupportedArchitecture(f"the model's config has no usable {name}: {found!r}")
    return found
