"""Make a model's logits on CPU independent of the batch, to the bit.

Two things round differently with the shape of a batch on vLLM's CPU build. Its products sum in an order that
depends on the number of rows. Its attention divides a context into tiles whose size depends on the number of query
tokens. Here a product takes as many rows at once as have the same order, and attention takes as few query tokens at
once as have the tiles of a single one. checks.py checks both when the model is loaded, and the layers between them.
A model for which this is not known is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)

from services.generation.engine.invariance.checks import (
    QUERY_ROWS,
    HeadForm,
    NotInvariant,
    ProductForm,
    RowsCall,
    check_attention,
    check_by_row,
    checked_least_rows,
    dtype_name,
    schedule_of,
)
from services.generation.engine.invariance.rows import in_parts, query_groups

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models that do nothing between their layers but add, reshape and divide tensors."""
DTYPES = (torch.bfloat16, torch.float32)
_LINEAR = (MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
_EMBEDDINGS = (ParallelLMHead, VocabParallelEmbedding)
_KNOWN = frozenset(
    {
        *_LINEAR,
        *_EMBEDDINGS,
        RotaryEmbedding,
        Llama3RotaryEmbedding,
        RMSNorm,
        SiluAndMul,
        Attention,
        LogitsProcessor,
    }
)
_POSITION = 77


# Methods of layers become these, which Python allows only for classes with a single base.
class InvariantLinearMethod(UnquantizedLinearMethod):
    """vLLM's products of a linear layer, of as many rows at once as have the same order of sums."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the products of rows [m, k], [m, n]."""
        product = super().apply
        return in_parts(lambda rows: product(layer, rows, bias), x, layer.least_rows)


class InvariantHeadMethod(UnquantizedEmbeddingMethod):
    """vLLM's products of an output head, of as many rows at once as have the same order of sums."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of rows [m, k], [m, n]."""
        product = super().apply
        return in_parts(lambda rows: product(layer, rows, bias), x, layer.least_rows)


class InvariantMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata, with each group of query tokens as a separate sample."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Return the metadata of a step."""
        common = common_attn_metadata
        form = HeadForm(self.num_heads, self.num_kv_heads, self.head_dim, self.dtype, self.isa)
        groups = query_groups(common.query_start_loc.numpy(), common.seq_lens.numpy(), form.most_queries)
        starts, lengths = (
            torch.from_numpy(each.astype(np.int32)) for each in (groups.starts, groups.lengths)
        )
        grouped = replace(
            common,
            num_reqs=len(lengths),
            query_start_loc=starts,
            seq_lens=lengths,
            block_table_tensor=common.block_table_tensor[torch.from_numpy(groups.owners)],
        )
        made = super().build(common_prefix_len, grouped, fast_build)
        return replace(made, scheduler_metadata=schedule_of(form, starts, lengths))


class InvariantCPUBackend(CPUAttentionBackend):
    """vLLM's CPU_ATTN with our metadata; it keeps that name."""

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the builder of metadata."""
        return InvariantMetadataBuilder


def make_invariant(model: nn.Module, config: VllmConfig) -> None:
    """Make a loaded model's logits independent of the batch, before its KV is allocated.

    Raises:
        NotInvariant: this is not known for the model, or a check fails on this processor.
    """
    if reason := _refusal(model, config):
        raise NotInvariant(reason)
    dtype, least = config.model_config.dtype, dict[ProductForm, int]()
    for form in set(_heads_of(model, config)):
        check_attention(form, config.model_config.max_model_len)
    for name, call in _by_row(model, dtype):
        check_by_row(name, call)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.attn_backend = InvariantCPUBackend
        elif (sizes := _sizes_of(layer)) is not None:
            form_of = ProductForm(*sizes, dtype, getattr(layer, "bias", None) is not None)
            if form_of not in least:
                least[form_of] = checked_least_rows(form_of)
            layer.least_rows = least[form_of]
            ours = InvariantLinearMethod if isinstance(layer, LinearBase) else InvariantHeadMethod
            layer.quant_method.__class__ = ours


def _refusal(model: nn.Module, config: VllmConfig) -> str:
    """Return why the logits of a model are not known to be independent of the batch; "" if they are."""
    settings = config.model_config
    if others := [each for each in settings.architectures if each not in ARCHITECTURES]:
        return f"on CPU it is known for {', '.join(ARCHITECTURES)}, and not for architecture {others[0]}"
    name = dtype_name(settings.dtype)
    if settings.dtype not in DTYPES:
        return f"on CPU it is known for dtypes bfloat16 and float32, and not for {name}"
    if others := [each.isa for each in _heads_of(model, config) if each.isa not in QUERY_ROWS]:
        return f"it is not known for vLLM's attention {others[0]}"
    return next((reason for layer in _layers(model) if (reason := _layer_refusal(layer, name))), "")


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that are known as a whole or have no parts."""
    parts = list(module.children())
    if type(module) in _KNOWN or not parts:
        yield module
    else:
        for part in parts:
            yield from _layers(part)


def _layer_refusal(layer: nn.Module, dtype: str) -> str:
    kind = type(layer)
    if kind not in _KNOWN:
        return f"on CPU it is not known for layers of class {kind.__name__}"
    if isinstance(layer, Attention):
        impl = layer.impl
        plain = (
            layer.attn_backend is CPUAttentionBackend
            and impl.attn_type == AttentionType.DECODER
            and impl.kv_cache_dtype in ("auto", dtype)
            and (impl.sliding_window, impl.alibi_slopes, impl.sinks, impl.logits_soft_cap)
            == (-1, None, None, 0)
        )
        return "" if plain else "on CPU it is not known for attention with a window, sinks, a cap or other KV"
    if isinstance(layer, LogitsProcessor):
        return "" if layer.soft_cap is None else "on CPU it is not known for logits with a cap"
    if kind in (*_LINEAR, *_EMBEDDINGS):
        method = type(layer.quant_method)
        plain = method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        return "" if plain else f"on CPU it is not known for products by {method.__name__}"
    return ""


def _heads_of(model: nn.Module, config: VllmConfig) -> Iterator[HeadForm]:
    dtype, block_size = config.model_config.dtype, config.cache_config.block_size
    for each in model.modules():
        if isinstance(each, Attention):
            isa = _get_attn_isa(dtype, block_size, each.head_size)
            yield HeadForm(each.num_heads, each.num_kv_heads, each.head_size, dtype, isa)


def _sizes_of(layer: nn.Module) -> tuple[int, int] | None:
    """Return outputs and inputs of a layer that has a product; None for other layers."""
    if isinstance(layer, LinearBase):
        return layer.output_size_per_partition, layer.input_size_per_partition
    if isinstance(layer, VocabParallelEmbedding):
        return layer.num_embeddings_per_partition, layer.embedding_dim
    return None


def _by_row(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, RowsCall]]:
    """Yield the layers that compute each row by itself, one of each form, as functions of a number of rows."""
    made, seen = torch.Generator().manual_seed(0), set[str]()
    layers = list(model.modules())
    merged = [
        each.output_size_per_partition for each in layers if isinstance(each, MergedColumnParallelLinear)
    ]
    first = next(each for each in layers if isinstance(each, Attention))
    parts = [each * first.head_size for each in (first.num_heads, first.num_kv_heads, first.num_kv_heads)]
    for layer in layers:
        if isinstance(layer, RMSNorm):
            call, sizes = _normed, [len(layer.weight)]
        elif isinstance(layer, SiluAndMul):
            call, sizes = _activated, merged
        elif isinstance(layer, RotaryEmbedding):
            call, sizes = partial(_rotated, parts), [sum(parts)]
        else:
            continue
        for size in sizes:
            name = f"{type(layer).__name__} of {size}"
            if name not in seen:
                seen.add(name)
                yield name, partial(call, layer, torch.randn(size, generator=made).to(dtype))


def _normed(layer: nn.Module, row: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
    """Return the norm of rows, also as that of two heads in a wider row, and with a residual."""
    heads = row.repeat(rows, 3)[:, : 2 * len(row)].unflatten(1, (2, len(row)))
    x = row.repeat(rows, 1)
    return layer(x.clone()), layer(heads).flatten(1), *layer(x.clone(), 2 * x)


def _activated(layer: nn.Module, row: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
    return (layer(row.repeat(rows, 1)),)


def _rotated(parts: Sequence[int], layer: nn.Module, row: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
    query, key, _ = row.repeat(rows, 1).split(parts, 1)
    found: Sequence[torch.Tensor] = layer(torch.full((rows,), _POSITION), query, key)
    return found
