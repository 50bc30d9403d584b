"""Decide which layers and steps our attention kernel computes. Pure.

The KV that it needs is what vLLM's Triton and FlashAttention backends keep: a layer has [blocks, key-value heads,
block, 2 * head size], keys in the first half of the last axis, values in the second, in the dtype of the queries;
blocks and heads may lie in memory in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.short_query_attention.inputs import HEAD_SIZES

LONGEST_SHORT_QUERY = 16
"""Query tokens of a request up to which a step is a short one: decoding, and the verification of 15 drafts."""

_PLAIN_KV = ("auto", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """Traits of an attention layer. `window` is the number of positions that a query sees, None for all."""

    head_size: int
    heads: int
    kv_heads: int
    decoder: bool = True
    kv_dtype: str = "auto"
    window: int | None = None
    alibi: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    lookback: bool = False
    context_parallel: bool = False
    microbatches: bool = False
    batch_invariant: bool = False


def refusal(layer: LayerTraits) -> str | None:
    """Return why vLLM's own attention must compute a layer; None if our kernel can."""
    reasons = (
        (not layer.decoder, "it is not a decoder's attention over its own KV"),
        (
            layer.head_size not in HEAD_SIZES,
            f"its heads have a size of {layer.head_size}, not a multiple of 8 from 16 to 256",
        ),
        (layer.kv_dtype not in _PLAIN_KV, f"its KV is {layer.kv_dtype}"),
        (layer.kv_heads < 1 or layer.heads % max(1, layer.kv_heads) != 0, "its heads do not come in groups"),
        (layer.alibi, "it has ALiBi"),
        (layer.soft_cap != 0, "its scores are capped"),
        (layer.sinks, "it has attention sinks"),
        (layer.lookback, "it looks back by chunks"),
        (layer.context_parallel, "its contexts are split among devices"),
        (layer.microbatches, "microbatches overlap, and would share the memory of the pieces"),
        (layer.batch_invariant, "results must not depend on the batch"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def is_short(longest_query: int, causal: object, special_masks: bool) -> bool:
    """Return whether our kernel computes a step: query lengths of 1 to 16, mixed in any way, in one launch.

    Args:
        longest_query: an upper bound of a request's query tokens. Of a captured CUDA graph it is one for every
            step that the graph is ever replayed with, so the choice that is captured holds for all of them.
        causal: vLLM's word on it: True, False, or a tensor with one for each request.
        special_masks: some queries see ahead, or have a window of their own.
    """
    return 0 < longest_query <= LONGEST_SHORT_QUERY and causal is True and not special_masks
