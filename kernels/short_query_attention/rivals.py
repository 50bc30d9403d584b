"""Other attention over the same paged cache, where it is installed: FlashInfer's, and vLLM's own.

They are looked up by name when a benchmark or a race asks, never imported by anything else here. Each maker raises
whatever its library does if it is absent or of another version. Signatures were read in vLLM 0.32, FlashInfer's as
vLLM 0.32 calls them (its lock has FlashInfer 0.7.0). None of it was ever executed: there was no GPU.
"""

from __future__ import annotations

from importlib import import_module

import torch

from kernels.short_query_attention.inputs import AttentionStep
from kernels.timing import Run


def vllm_attention(step: AttentionStep, generation: int) -> Run:
    """vLLM's FlashAttention over the same paged cache; 3 is the generation that vLLM takes on Hopper."""
    attention = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    def run() -> torch.Tensor:
        return attention(
            step.query,
            step.keys,
            step.values,
            max_seqlen_q=step.longest_query,
            cu_seqlens_q=step.cu_queries,
            max_seqlen_k=step.longest,
            seqused_k=step.lengths,
            softmax_scale=step.scale,
            causal=True,
            block_table=step.block_table,
            fa_version=generation,
        )

    return run


def vllm_own_attention(step: AttentionStep) -> Run:
    """vLLM's choice where it does not take FlashInfer: FlashAttention, or its Triton attention."""
    utilities = import_module("vllm.v1.attention.backends.fa_utils")
    generation = utilities.get_flash_attn_version(head_size=step.query.shape[2])
    if generation is None:
        return vllm_unified_attention(step)
    return vllm_attention(step, generation)


def vllm_unified_attention(step: AttentionStep) -> Run:
    """vLLM's Triton attention, which takes prefills and decoding in one launch too, over the same paged cache."""
    attention = import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    requests, heads, size = len(step.lengths), step.query.shape[1], step.query.shape[2]
    # As vLLM's metadata builder has it: few requests that decode are split into 16 segments.
    segments, few = 16, 128 // step.keys.shape[2]
    wide = 1 << (size - 1).bit_length()
    device = step.query.device
    parts = torch.empty(few, heads, segments, wide, dtype=torch.float32, device=device)
    peaks, sums = torch.empty(2, few, heads, segments, dtype=torch.float32, device=device)
    one = torch.ones(requests, step.keys.shape[2], dtype=torch.float32, device=device)
    out = torch.empty_like(step.query)

    def run() -> torch.Tensor:
        attention(
            q=step.query,
            k=step.keys,
            v=step.values,
            out=out,
            cu_seqlens_q=step.cu_queries,
            max_seqlen_q=step.longest_query,
            seqused_k=step.lengths,
            max_seqlen_k=step.longest,
            softmax_scale=step.scale,
            causal=True,
            window_size=(-1, -1) if step.window is None else (step.window - 1, 0),
            block_table=step.block_table,
            softcap=0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
            seq_threshold_3D=few,
            num_par_softmax_segments=segments,
            softmax_segm_output=parts,
            softmax_segm_max=peaks,
            softmax_segm_expsum=sums,
        )
        return out

    return run


def flashinfer_attention(step: AttentionStep) -> Run:
    """FlashInfer's paged prefill with ragged queries; planning is left out of the time."""
    prefill = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    device, block = step.query.device, step.keys.shape[1]
    counts = (step.lengths + block - 1) // block
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    starts[1:] = counts.cumsum(0)
    table = torch.cat([row[:count] for row, count in zip(step.block_table, counts.tolist(), strict=True)])
    wrapper = prefill(torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD")
    wrapper.plan(
        qo_indptr=step.cu_queries.cpu(),
        paged_kv_indptr=starts.cpu(),
        paged_kv_indices=table,
        paged_kv_last_page_len=((step.lengths - 1) % block + 1).cpu(),
        num_qo_heads=step.query.shape[1],
        num_kv_heads=step.keys.shape[2],
        head_dim_qk=step.query.shape[2],
        page_size=block,
        causal=True,
        sm_scale=step.scale,
        window_left=-1 if step.window is None else step.window - 1,
        q_data_type=step.query.dtype,
        kv_data_type=step.keys.dtype,
    )
    return lambda: wrapper.run(step.query, (step.keys, step.values))
