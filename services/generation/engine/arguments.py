"""Build vLLM's configuration from our options, and read the end-of-sequence tokens of a model.

Import this module after `environment.set_variables`, as `core` and `outlook` do: vLLM reads its environment when
it is imported.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from paceline.files import read_object
from services.generation.engine.draft_forms import form_of
from services.generation.engine.draft_models.kinds import wanted
from services.generation.engine.environment import (
    V2,
    cpu_invariance_refusal,
    invariance_refusal,
    runner_of,
    runner_refusal,
)
from services.generation.engine.model_support import Feature, ModelSupport, model_support
from services.generation.engine.step_sizes import graph_sizes, row_capacity
from services.generation.engine.traits import engine_traits
from services.generation.engine.types import INVARIANCE_KEY, KERNELS_KEY, EngineOptions

_WORKERS = {
    "cpu": "services.generation.engine.worker.CoupledCPUWorker",
    "cuda": "services.generation.engine.worker.CoupledGPUWorker",
}


def engine_config(options: EngineOptions) -> VllmConfig:
    """Resolve our options into vLLM's configuration; vLLM chooses what is not set.

    Raises:
        ValueError: options exclude each other, or the device or the model does not support them.
    """
    config, support = _allowed_config(options)
    capture_drafts(config, options.draft_window if support.allows(Feature.DRAFTS) else 0)
    if (form := form_of(options)) is not None:
        config.additional_config[form.key] = support.allows(form.feature)
    return config


def _allowed_config(options: EngineOptions) -> tuple[VllmConfig, ModelSupport]:
    """Return vLLM's configuration, without a prefix cache if the model must not have one, and what it allows.

    vLLM chooses the blocks of a recurrent state by whether there is a prefix cache, so the configuration is
    resolved again without it.
    """
    config = _resolved(engine_args(options))
    v2 = runner_of(options.engine) == V2
    support = model_support(engine_traits(config, v2=v2, coupled=options.coupled))
    if config.cache_config.enable_prefix_caching and not support.allows(Feature.PREFIX_CACHE):
        config = _resolved(engine_args(replace(options, enable_prefix_caching=False)))
    return config, support


def _resolved(args: EngineArgs) -> VllmConfig:
    """Return vLLM's configuration, with an attention backend that this processor has for the model.

    On a processor with AMX vLLM chooses a backend for latent KV that accepts only bfloat16; other dtypes get the
    backend that runs on every processor.
    """
    config = args.create_engine_config(UsageContext.LLM_CLASS)
    model = config.model_config
    if current_platform.is_cpu() and model.use_mla and str(model.dtype) != "torch.bfloat16":
        config = replace(args, attention_backend="CPU_MLA").create_engine_config(UsageContext.LLM_CLASS)
    return config


def capture_drafts(config: VllmConfig, draft_window: int) -> None:
    """Add CUDA graph sizes for steps with up to `draft_window` drafts per sample, if graphs are captured at all."""
    compilation, scheduler = config.compilation_config, config.scheduler_config
    capacity = row_capacity(scheduler.max_num_batched_tokens, config.model_config.get_vocab_size())
    own = compilation.cudagraph_capture_sizes or ()
    if sizes := graph_sizes(own, scheduler.max_num_seqs, draft_window, capacity):
        compilation.cudagraph_capture_sizes = list(sizes)
        compilation.max_cudagraph_capture_size = sizes[-1]


def engine_args(options: EngineOptions) -> EngineArgs:
    """Build vLLM's arguments from our options. ValueError for options that exclude each other."""
    on_cpu = current_platform.is_cpu()
    kind = "cpu" if on_cpu else "cuda"
    chosen: dict[str, Any] = {
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "block_size": options.block_size,
        "compilation_config": options.compilation_config,
        "speculative_config": options.vllm_speculation,
        "additional_config": _for_workers(options) or None,
        # vLLM refuses it on CPU, where its worker ignores sleeping.
        "enable_sleep_mode": (options.sleep_mode and not on_cpu) or None,
    }
    if reason := _refusal(options, on_cpu):
        raise ValueError(reason)
    if options.coupled:
        # vLLM builds its sampler, which is never called. Without FlashInfer installed, building that one would
        # fail.
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if on_cpu:
        import_model_classes(options.model)
        for own in wanted(options).values():
            if checkpoint := getattr(own, "checkpoint", ""):
                import_model_classes(checkpoint)
    return EngineArgs(
        model=options.model,
        tokenizer=options.model,
        skip_tokenizer_init=True,
        load_format=options.load_format,
        dtype=options.dtype,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        enforce_eager=on_cpu if options.enforce_eager is None else options.enforce_eager,
        tensor_parallel_size=options.tensor_parallel_size,
        enable_expert_parallel=options.enable_expert_parallel,
        distributed_executor_backend=_executor(options, on_cpu),
        async_scheduling=False,
        disable_log_stats=True,
        seed=0,
        worker_cls=_WORKERS[kind] if options.coupled else "auto",
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _refusal(options: EngineOptions, on_cpu: bool) -> str:
    """Return why an engine cannot be built with these options; "" if it can."""
    draft_models = " and ".join(kind.words for kind in wanted(options))
    reasons = (
        (
            options.coupled and options.vllm_speculation is not None,
            "vLLM's own speculation needs vLLM's own runner: coupled=False",
        ),
        (bool(draft_models) and not options.coupled, f"{draft_models} need the coupled runner"),
        (
            # An instance would crash on its first sample: the kernel reads weights of experts it does not have.
            on_cpu and options.enable_expert_parallel,
            "enable_expert_parallel: vLLM's kernel for experts on CPU needs all of them on each rank",
        ),
    )
    own = next((reason for applies, reason in reasons if applies), "")
    if on_cpu:
        return own or runner_refusal(options) or cpu_invariance_refusal(options)
    return own or runner_refusal(options) or invariance_refusal(options.batch_invariant, _capability())


def _capability() -> tuple[int, int] | None:
    """Return the compute capability of the device; None if it is no CUDA device."""
    if not current_platform.is_cuda():
        return None
    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def import_model_classes(model: str) -> None:
    """Register the classes that a model folder names; a class that cannot be imported is left to vLLM's own error.

    For use on CPU. vLLM inspects a class in another process, so that the import cannot start CUDA. On CPU nothing
    can start CUDA, and that process, which imports all of vLLM once more, would double the time of an instance's
    first start.
    """
    config = Path(model) / "config.json"
    if not config.is_file():
        return
    for architecture in read_object(config).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            with suppress(ImportError):
                ModelRegistry.register_model(architecture, known.load_model_cls())


def _for_workers(options: EngineOptions) -> dict[str, Any]:
    """Return the options of our workers that vLLM does not know."""
    found: dict[str, Any] = {kind.key: asdict(own) for kind, own in wanted(options).items()}
    if options.kernels != "auto":
        found[KERNELS_KEY] = options.kernels
    if options.batch_invariant and current_platform.is_cpu():
        found[INVARIANCE_KEY] = True
    return found


def _executor(options: EngineOptions, on_cpu: bool) -> str:
    if options.executor == "ray":
        if on_cpu:
            raise ValueError("executor ray needs CUDA: vLLM does not place CPU workers on a Ray cluster")
        return "ray"
    return "uni" if options.tensor_parallel_size == 1 else "mp"


def end_tokens(model_config: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the model, from its generation config or else its config."""
    declared = model_config.try_get_generation_config().get("eos_token_id")
    if declared is None:
        declared = getattr(model_config.hf_text_config, "eos_token_id", None)
    if declared is None:
        return ()
    return (declared,) if isinstance(declared, int) else tuple(declared)


def ties_head(model_config: Any) -> bool:
    """Return True if the configuration ties the output head to the input embedding.

    vLLM unties them if the checkpoint has a head, and ties them again if the two are equal.
    """
    declared = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    return bool(declared or model_config.word_embeddings_untied_by_checkpoint)


def refuse_early_numba() -> None:
    """Raise RuntimeError if numba is loaded on CPU.

    vLLM's CPU platform walks all loaded modules while it builds a worker, and fails on llvmlite's proxies.
    """
    if current_platform.is_cpu() and "llvmlite.binding" in sys.modules:
        raise RuntimeError("numba was imported before the engine was built; vLLM 0.32 cannot start after it")
