"""Replace vLLM's attention of short queries by our short-query kernel.

The backends here are vLLM's own, Triton and FlashAttention, with one change: a step in which no request has more
than 17 query tokens, decoding and verification in any mixture, is one launch of `kernels.short_query_attention`.
KV layout, writes, metadata, CUDA graphs, and all steps with a prefill in them are vLLM's, except for samples with
drafts that are no chains (draft_forms.py).

The backends replace their originals in vLLM's registry, so vLLM still chooses among backends layer by layer. If it
chooses another one (MLA, FlashInfer on Blackwell), nothing here runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from kernels.backend import Backend, choose, in_use
from kernels.selfcheck import check_attention
from kernels.short_query_attention import AttentionStep
from kernels.short_query_attention.inputs import HEAD_SIZES, Scratch
from kernels.short_query_attention.race import AttentionName
from kernels.tuning import tuning
from services.generation.engine.draft_forms import masks_in_use
from services.generation.engine.kernel_choice import ATTENTION, leave_out, measured_choice

LONGEST_SHORT_QUERY = 17
"""Most query tokens of a request in a short step: decoding, or the verification of as many drafts as the default
`draft_window`. Tiles of 32 rows, the default most, serve 16 and 17 query tokens alike if heads share KV."""

_log = logging.getLogger(__name__)
_PLAIN_KV = ("auto", "float16", "bfloat16")
_SPECIAL_MASKS = (
    "mm_prefix_range", "mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens"
)  # fmt: skip
"""Fields of vLLM's metadata that are None unless some queries see positions other than the earlier ones."""


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """Traits of an attention layer. `window` is the number of positions that a query sees; None means all."""

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


def layer_refusal(layer: LayerTraits) -> str | None:
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
    """Return whether our kernel computes a step: query lengths of 1 to 17, mixed in any way, in one launch.

    Args:
        longest_query: upper bound of a request's query tokens. For a captured CUDA graph it bounds every step with
            which the graph is replayed, so the choice made at the capture holds for all of them.
        causal: vLLM's value: True, False, or a tensor with a value for each request.
        special_masks: some queries see ahead, or have separate windows.
    """
    return 0 < longest_query <= LONGEST_SHORT_QUERY and causal is True and not special_masks


class ShortQueryMixin:
    """Mixin for vLLM's `AttentionImpl`s that keep KV as its Triton and FlashAttention backends do.

    A layer has [blocks, key-value heads, block, 2 * head size], with keys in the first half of the last axis and
    values in the second, in the dtype of the queries; blocks and heads may be in memory in any order.

    CUDA graphs: a launch depends on shapes and on upper bounds that hold for every replay of a capture (a graph for
    plain decoding has one query token per request; one for any batch of n tokens has at most n), and it waits for
    nothing.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        traits = traits_of(self)
        reason = layer_refusal(traits)
        if reason is not None:
            _log_once(reason)
        self._ours = reason is None
        self._window = traits.window
        self._prepared = False

    @property
    def is_ours(self) -> bool:
        """True if our kernel computes the short steps of this layer."""
        return self._ours

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do as vLLM: write `output` [T, Hq, D] for the query tokens of requests, and return it."""
        scratch = self._scratch(query.device) if self._ours else None
        form = masks_in_use()
        if scratch is None or attn_metadata is None or (form is not None and not form.active):
            form = None
        if form is not None:
            form.keep(kv_cache, attn_metadata.slot_mapping)
        scales = (output_scale, output_block_scale)
        if scratch is None or not self._takes(query, kv_cache, attn_metadata, output, scales):
            rest = (layer, query, key, value, kv_cache, attn_metadata, output, *scales)
            vllms: torch.Tensor = super().forward(*rest)  # type: ignore[misc]
            if form is not None:
                assert scratch is not None
                tokens, apart = form.apart(self._step(query, kv_cache, attn_metadata))
                output.index_copy_(0, tokens, self._attend(apart, scratch))
            return vllms
        step = self._step(query, kv_cache, attn_metadata)
        self._attend(step if form is None else form.masked(step), scratch, output[: len(step.query)])
        return output

    def _attend(self, step: AttentionStep, scratch: Scratch, out: torch.Tensor | None = None) -> torch.Tensor:
        from kernels.short_query_attention.triton_attend import attend_triton, prepare

        if not self._prepared and not _capturing(step.query.device):
            prepare(replace(step, tree=None), LONGEST_SHORT_QUERY, scratch)
            if (form := masks_in_use()) is not None and form.wanted:
                unused = torch.zeros(1, dtype=torch.int64, device=step.query.device)
                prepare(replace(step, tree=unused), form.longest, scratch)
            self._prepared = True
        return attend_triton(step, out=out, scratch=scratch)

    def _scratch(self, device: torch.device) -> Scratch:
        group = self.num_heads // self.num_kv_heads
        rows = Scratch.rows_for(LONGEST_SHORT_QUERY, group, device, tuning(device))
        return _shared_scratch(rows, self.head_size, device)

    def _takes(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        scales: tuple[torch.Tensor | None, ...],
    ) -> bool:
        """Return whether our kernel computes this step. There is no metadata when vLLM measures memory."""
        return (
            metadata is not None
            and scales == (None, None)
            and query.dtype == kv_cache.dtype == output.dtype
            and is_short(
                metadata.max_query_len,
                metadata.causal,
                any(getattr(metadata, name, None) is not None for name in _SPECIAL_MASKS),
            )
        )

    def _step(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> AttentionStep:
        """Convert vLLM's metadata to a step, without copies and without reading from the device."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return AttentionStep(
            query=query[: metadata.num_actual_tokens],
            keys=keys,
            values=values,
            block_table=metadata.block_table,
            lengths=metadata.seq_lens,
            cu_queries=metadata.query_start_loc,
            longest_query=metadata.max_query_len,
            longest=metadata.max_seq_len,
            scale=self.scale,
            window=self._window,
        )


def traits_of(impl: Any) -> LayerTraits:
    """Return the traits of a layer, from vLLM's own implementation of its attention."""
    config = get_current_vllm_config_or_none()
    before = impl.sliding_window[0]
    return LayerTraits(
        head_size=impl.head_size,
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        decoder=impl.attn_type == AttentionType.DECODER,
        kv_dtype=impl.kv_cache_dtype,
        window=None if before < 0 else before + 1,
        alibi=impl.alibi_slopes is not None,
        soft_cap=float(impl.logits_soft_cap),
        sinks=impl.sinks is not None,
        lookback=getattr(impl, "chunk_lookback", -1) > -1,
        context_parallel=impl.total_cp_world_size > 1,
        microbatches=config is not None and config.parallel_config.use_ubatching,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )


class ShortQueryTritonImpl(ShortQueryMixin, TritonAttentionImpl):
    """vLLM's Triton attention for prefills, ours for short queries."""


class ShortQueryTritonBackend(TritonAttentionBackend):
    """vLLM's TRITON_ATTN with our implementation; it keeps that name."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the implementation."""
        return ShortQueryTritonImpl


class ShortQueryFlashImpl(ShortQueryMixin, FlashAttentionImpl):
    """FlashAttention for prefills, ours for short queries."""


class ShortQueryFlashBackend(FlashAttentionBackend):
    """vLLM's FLASH_ATTN with our implementation; it keeps that name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Return the implementation."""
        return ShortQueryFlashImpl


_REPLACED: dict[AttentionBackendEnum, type] = {
    AttentionBackendEnum.FLASH_ATTN: ShortQueryFlashBackend,
    AttentionBackendEnum.TRITON_ATTN: ShortQueryTritonBackend,
}


def use_attention(
    config: Any,
    device: torch.device,
    measured: Callable[..., AttentionName] = measured_choice,
    *,
    masks: bool = False,
) -> AttentionName:
    """Choose the attention of this process, register it with vLLM, and return its name.

    It is vLLM's own on CPU, if the kernels' backend is the reference, in vLLM's batch-invariant mode, and for
    models whose heads or options our kernel cannot compute. With `triton` it is ours; a failed check is an error
    then. With `auto` it is the fastest by measurement (kernel_choice.py), ours only if it passes its check. Drafts
    that need a mask have ours if it passes its check, otherwise vLLM's, and nothing is measured. Call
    this after `use_kernels` and before the model is built.

    Args:
        config: vLLM's configuration, in which the name of another backend is set.
        device: device of this worker.
        measured: function that returns the fastest backend.
        masks: drafts may need a mask, because they are no chains.
    """
    chosen = _chosen(config, device, measured, masks)
    for place, ours in _REPLACED.items():
        if chosen is AttentionName.OURS:
            register_backend(place, f"{ours.__module__}.{ours.__qualname__}")
        else:
            place.clear_override()
    if chosen is AttentionName.FLASHINFER:
        config.attention_config.backend = AttentionBackendEnum.FLASHINFER
    return chosen


def _chosen(
    config: Any, device: torch.device, measured: Callable[..., AttentionName], masks: bool
) -> AttentionName:
    model = config.model_config
    if device.type != "cuda" or choose(device) is not Backend.TRITON or model.use_mla:
        return AttentionName.VLLM
    if envs.VLLM_BATCH_INVARIANT:
        # Ours divides contexts among programs depending on the batch, and vLLM does not allow FlashInfer in this
        # mode.
        return AttentionName.VLLM
    passed = _passes_check(model, config.parallel_config, device, masks)
    if in_use() is Backend.TRITON:
        return AttentionName.OURS if passed else AttentionName.VLLM
    # A backend that was requested of vLLM explicitly is kept.
    if config.attention_config.backend is not None:
        return AttentionName.VLLM
    if masks:
        return AttentionName.OURS if passed else AttentionName.VLLM
    return measured(config, device, ours=passed)


def _passes_check(model_config: Any, parallel_config: Any, device: torch.device, masks: bool) -> bool:
    heads = model_config.get_num_attention_heads(parallel_config)
    kv_heads = model_config.get_num_kv_heads(parallel_config)
    size = model_config.get_head_size()
    reason = layer_refusal(LayerTraits(size, heads, kv_heads))
    if reason is not None:
        _log_once(reason)
        return False
    try:
        check_attention(device, heads, kv_heads, size, model_config.dtype, masks)
    except Exception as error:  # A compiler's errors are of many kinds.
        if in_use() is Backend.TRITON:
            raise
        leave_out(ATTENTION, error)
        return False
    return True


@cache
def _shared_scratch(rows: int, size: int, device: torch.device) -> Scratch:
    """Return the memory of the programs' partial results, shared by all layers of a shape: they run in sequence."""
    return Scratch.of(rows, size, device)


@cache
def _log_once(reason: str) -> None:
    _log.info("a layer's attention is vLLM's own: %s", reason)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
