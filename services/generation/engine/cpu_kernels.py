"""Ask vLLM's kernels for CPU whether they compute a layer, without weights and without a step."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum


def layer_refusal(layer: Any, config: VllmConfig) -> str:
    """Return why vLLM's build for CPU does not compute a layer; "" if it raises no objection."""
    dtype = config.model_config.dtype
    if isinstance(layer, Attention):
        return _of_attention(layer, dtype, config.cache_config.block_size)
    if getattr(layer, "mamba_type", None) is MambaAttentionBackendEnum.GDN_ATTN:
        return _of_gated_delta(layer, dtype, config)
    return ""


def _of_attention(layer: Any, dtype: torch.dtype, block_size: int) -> str:
    """Call the function that plans a step of attention, for one sample with one token."""
    try:
        ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_size,
            seq_lens=torch.ones(1, dtype=torch.int32),
            dtype=dtype,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            causal=True,
            sliding_window_size=-1,
            isa=_get_attn_isa(dtype, block_size, layer.head_size),
            enable_kv_split=False,
        )
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _of_gated_delta(layer: Any, dtype: torch.dtype, config: VllmConfig) -> str:
    """Call the function that computes gated delta nets. It checks the dtype first, and fails after that."""
    metadata = GDNAttentionMetadata.__new__(GDNAttentionMetadata)
    metadata.num_actual_tokens = 1
    nothing = torch.empty(0, dtype=dtype, device="meta")
    with set_forward_context({layer.prefix: metadata}, config), suppress(Exception):
        try:
            cpu_gdn_attention_core(nothing, nothing, nothing, nothing, layer.prefix)
        except AssertionError as error:
            return str(error)
    return ""
