"""Read from vLLM the traits that decide which features an engine allows (model_support.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from services.generation.engine.draft_models.kinds import KINDS
from services.generation.engine.kernel_choice import KernelReport
from services.generation.engine.model_support import EngineTraits, Feature, ModelSupport, model_support
from services.generation.engine.types import EAGLE3

_log = logging.getLogger(__name__)
_EAGLE3 = next(kind for kind in KINDS if kind.name == EAGLE3)


def engine_traits(config: VllmConfig, *, v2: bool, coupled: bool = True, **known: Any) -> EngineTraits:
    """Return the traits of an engine from its configuration; `known` has the fields that are not in it."""
    model, parallel = config.model_config, config.parallel_config
    layers = set(getattr(model.hf_text_config, "layer_types", None) or ())
    return EngineTraits(
        current_platform.device_type,
        v2=v2,
        coupled=coupled,
        eagle3=_EAGLE3.key in config.additional_config,
        latent=model.use_mla,
        window=model.get_sliding_window() is not None
        or model.rswa_window is not None
        or bool(layers - {"full_attention"}),
        recurrent=model.is_hybrid or model.has_inner_state or model.is_attention_free,
        short_states=config.cache_config.use_replayssm,
        encoder=model.is_encoder_decoder,
        positions=model.uses_mrope,
        lookahead=model.is_mm_prefix_lm,
        experts=bool(model.get_num_experts()),
        kv_dtype=str(config.cache_config.cache_dtype),
        pipeline=parallel.pipeline_parallel_size,
        context_parallel=parallel.decode_context_parallel_size,
        **known,
    )


def support_of(core: Any, config: VllmConfig, reports: Sequence[KernelReport], *, v2: bool) -> ModelSupport:
    """Return the features that an engine allows for its model, and log the ones it refuses.

    Args:
        core: vLLM's engine core.
        config: its configuration.
        reports: reports of our workers; vLLM's own workers have none.
        v2: True if its runner is V2.
    """
    manager = core.scheduler.kv_cache_manager
    sizes = {each.block_size for each in manager.coordinator.single_type_managers}
    known: dict[str, Any] = {
        "groups": len(core.scheduler.kv_cache_config.kv_cache_groups),
        "partial_hits": manager.enable_caching and sizes != {manager.block_pool.hash_block_size},
    }
    for report in reports:
        known |= {"kinds": report.kinds, "hidden_states": report.hidden_states}
    support = model_support(engine_traits(config, v2=v2, coupled=bool(reports), **known))
    refusal = next((report.refusal for report in reports if report.refusal), "")
    if refusal:
        support = support.without(Feature.TREES, refusal)
    if support.refused:
        _log.warning("features_refused: %s", support)
    return support


def kinds_of(specs: Iterable[KVCacheSpec]) -> frozenset[str]:
    """Return the kinds of KV caches by the names of vLLM's classes, such as MambaSpec, or MambaSpec/gdn_attn."""
    return frozenset(_kind(each) for spec in specs for each in _single(spec))


def _kind(spec: KVCacheSpec) -> str:
    name = type(spec).__name__
    if isinstance(spec, MambaSpec) and spec.mamba_type is not MambaAttentionBackendEnum.MAMBA2:
        return f"{name}/{spec.mamba_type.name.lower()}"
    return name


def _single(spec: KVCacheSpec) -> Iterator[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec
