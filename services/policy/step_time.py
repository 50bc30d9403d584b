"""How long an engine step takes: rooflines with residuals, after EfficientRollout (section 4.2, appendix D). Pure.

A step has a row for each sample and each draft token. Its dense layers move the weights and compute with each row;
then its attention moves the KV of all tokens before it and computes with each row and those. Each of the two takes
as long as the longer of its parts. What is left over grows with the samples and with the draft tokens. What that
leaves over is looked up (see `residual`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from services.policy.residual import DRAFTS, Residual, corrected

# Before anything is measured: an engine step on a modest machine with a CPU's or a small GPU's memory.
_PRIOR_THROUGHPUT = 1e12
_PRIOR_BANDWIDTH = 5e10
_PRIOR_BASE = 2e-3
_PRIOR_PER_REQUEST = 2e-5
_PRIOR_PER_ROW = 2e-5
Number = Any
"""A float, or an array of such."""
_MIXTURE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnsupportedArchitecture(ValueError):
    """The model is no dense transformer with grouped-query attention, or its config lacks what one has."""


class Architecture(BaseModel):
    """What a forward pass of a model moves and computes. Bytes and floating point operations."""

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
        """From a Hugging Face config, with weights and KV of `value_bytes` a value.

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
    """The time of a step, in seconds, by requests, rows and context.

    `requests` samples decode; `rows` counts them and their draft tokens; `context` is the sum of the samples'
    lengths, in tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    architecture: Architecture
    throughput: float = Field(gt=0)
    """Operations a second."""
    bandwidth: float = Field(gt=0)
    """Bytes a second."""
    kv_scale: float = Field(default=1.0, ge=0)
    """KV traffic as a multiple of the KV's size: caches lower it, a slow attention kernel raises it."""
    base: float = Field(default=0.0, ge=0)
    """Seconds of any step."""
    per_request: float = Field(default=0.0, ge=0)
    """Seconds for each sample."""
    per_row: float = Field(default=0.0, ge=0)
    """Seconds for each draft token."""
    per_attended_token: float = Field(default=0.0, ge=0)
    """Seconds for each token of context, times the root of the draft tokens a sample: attention is further from its
    roofline with several rows a sample than with one, and each row adds less to that than the one before it."""
    verify_per_request: float = Field(default=0.0, ge=0)
    """Seconds for each sample of a step with any draft token: other kernels run then."""
    residual: Residual | None = None
    """What all of this leaves over. Times rise with the draft tokens, whatever it says."""

    @classmethod
    def prior(cls, architecture: Architecture) -> Self:
        """A guess for a machine that was never measured: the shape is right, the scale need not be."""
        return cls(
            architecture=architecture,
            throughput=_PRIOR_THROUGHPUT,
            bandwidth=_PRIOR_BANDWIDTH,
            base=_PRIOR_BASE,
            per_request=_PRIOR_PER_REQUEST,
            per_row=_PRIOR_PER_ROW,
        )

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """The predicted time; the arguments broadcast. A step without rows is none, and takes no time."""
        n, r, c = (_number(each) for each in (requests, rows, context))
        predicted = self.rough_seconds(n, r, c)
        if self.residual is not None:
            n, r, c = np.broadcast_arrays(n, r, c)
            drafts = n[..., None] * (1 + np.array(DRAFTS))
            at_drafts = self.rough_seconds(n[..., None], drafts, c[..., None])
            predicted = corrected(np.asarray(predicted), at_drafts, self.residual.of(n, _mean(c, n)))
        return np.asarray(predicted * (r > 0))

    def rough_seconds(self, requests: Number, rows: Number, context: Number) -> Number:
        """Without the residual, as if there were no empty steps."""
        rest = self.base + self.per_request * requests
        verification = self.verification_seconds(requests, rows - requests, context)
        return (
            self.dense_seconds(rows) + self.attention_seconds(requests, rows, context) + rest + verification
        )

    def verification_seconds(self, requests: Number, drafted: Number, context: Number) -> Number:
        """Time beyond the rooflines that verifying so many draft tokens takes."""
        attending = self.per_attended_token * context * np.sqrt(_mean(drafted, requests))
        return drafted * self.per_row + attending + (drafted > 0) * (self.verify_per_request * requests)

    @property
    def weight_seconds(self) -> float:
        """Time to move the weights."""
        return self.architecture.weight_bytes / self.bandwidth

    def kv_seconds(self, context: Number) -> Number:
        """Time to move the KV of so many tokens."""
        return self.kv_scale * self.architecture.kv_bytes * context / self.bandwidth

    def dense_seconds(self, rows: Number) -> Number:
        """The roofline of the dense layers."""
        return np.maximum(self.weight_seconds, rows * (self.architecture.dense_flops / self.throughput))

    def attention_seconds(self, requests: Number, rows: Number, context: Number) -> Number:
        """The roofline of attention; a row attends to the mean length of the samples."""
        row = self.architecture.attention_flops * _mean(context, requests) / self.throughput
        return np.maximum(self.kv_seconds(context), rows * row)


def _number(given: ArrayLike) -> Number:
    """An array, but what is one number stays one: arithmetic with it is ten times as fast."""
    return float(given) if isinstance(given, (int, float)) else np.asarray(given, np.float64)


def _mean(tokens: Number, requests: Number) -> Number:
    """Of a sample, where all together have so many."""
    return tokens / (max(requests, 1.0) if isinstance(requests, float) else np.maximum(requests, 1.0))


def _size(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    found = config.get(name)
    if found is None:
        found = otherwise
    if not isinstance(found, int) or found < 1:
        raise UnsupportedArchitecture(f"the model's config has no usable {name}: {found!r}")
    return found
