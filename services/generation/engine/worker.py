"""Workers for vLLM: its own, with our model runner, draft models and kernels in them.

vLLM replaces weights layer by layer, as each layer's loader is called. The loaders of some models write past it,
and vLLM then puts the old weights back: GPT-OSS keeps its experts and sinks. It reports that in its log only, so
the worker listens to the log and refuses to serve a model with stale layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from kernels.short_query_attention.race import AttentionName
from services.generation.engine.attention_backend import use_attention
from services.generation.engine.draft_models.eagle3 import Eagle3
from services.generation.engine.draft_models.interface import ModelDrafter
from services.generation.engine.draft_models.quantized import QuantizedSelfDraft
from services.generation.engine.kernel_choice import KernelReport, failed, use_kernels
from services.generation.engine.model_support import Feature, ModelSupport, model_support, worker_refusal
from services.generation.engine.runner import coupled
from services.generation.engine.step_sizes import row_capacity, step_memory
from services.generation.engine.traits import engine_traits, kinds_of
from services.generation.engine.trees.attention import BRANCHES, BranchAttention
from services.generation.engine.types import (
    EAGLE3,
    EAGLE3_KEY,
    KERNELS_KEY,
    QUANTIZED,
    QUANTIZED_KEY,
    TREES_KEY,
    Ask,
    Drafted,
    Eagle3Options,
    W4Options,
)
from services.generation.kv_transfer.port import KvWorkerMixin
from services.platform.memory import return_freed_memory

LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
MESSAGE = "%s: Failed to load weights"
"""vLLM's line, with the class of a layer."""


class StaleLayers(RuntimeError):
    """Layers that still have old weights; the engine must not serve."""


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the class of a layer."""
        if record.msg == MESSAGE and isinstance(record.args, tuple):
            self.names.add(str(record.args[0]))


@contextmanager
def stale_layers() -> Iterator[set[str]]:
    """Collect the classes of layers that vLLM leaves as they were within the context."""
    listener, logger = _Listener(), logging.getLogger(LOGGER)
    level = logger.level
    logger.addHandler(listener)
    if not logger.isEnabledFor(logging.WARNING):
        logger.setLevel(logging.WARNING)
    try:
        yield listener.names
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def check_layers(model: nn.Module, stale: set[str]) -> None:
    """Raise StaleLayers if a layer of these classes has weights of its own.

    Others have none but those of another layer, such as a tied head, or tables that are computed, such as those of
    rotary positions.
    """
    layers = list(model.modules())
    loaded = {id(each) for layer in layers if type(layer).__name__ not in stale for each in _weights(layer)}
    wrong = {
        type(layer).__name__
        for layer in layers
        if type(layer).__name__ in stale and any(id(each) not in loaded for each in _weights(layer))
    }
    if wrong:
        raise StaleLayers(
            f"vLLM cannot load new weights into {', '.join(sorted(wrong))}, and has left the old ones"
        )


def _weights(layer: nn.Module) -> Iterator[nn.Parameter]:
    return layer.parameters(recurse=False)


_log = logging.getLogger(__name__)
# No slice of the first build is waited for.
_AT_ONCE = float("inf")


class _CoupledWorkerMixin(KvWorkerMixin):
    """Methods of a worker beyond vLLM's own interface."""

    model_runner: Any
    vllm_config: Any
    device: Any
    drafters: dict[str, ModelDrafter]
    use_v2_model_runner: bool
    # None where no sample drafts in branches.
    branches: BranchAttention | None
    get_kv_cache_spec: Any
    # Of `EngineTraits`, what only the loaded model tells.
    model_traits: dict[str, Any]

    def couple(self, runner: Any) -> Any:
        """Return the runner with our sampler in it."""
        if self.use_v2_model_runner:
            # V1 is spared the import of V2.
            from services.generation.engine.v2.runner import coupled_v2

            runner.__class__ = coupled_v2(type(runner))
        else:
            runner.__class__ = coupled(type(runner))
        runner.init_coupled()
        if self.branches is not None:
            from services.generation.engine.trees.attention import TreeSteps

            runner.trees = TreeSteps(self.branches)
        return runner

    def use_kernels(self) -> None:
        """Choose the kernels of this process (see `kernel_choice.use_kernels` and `attention.use_attention`)."""
        config = self.vllm_config
        trees = bool(config.additional_config.get(TREES_KEY))
        use_kernels(config.additional_config.get(KERNELS_KEY, "auto"), self.device)
        self.attention = use_attention(config, self.device, trees=trees)
        self.branches = self.use_branches() if trees else None

    def use_branches(self) -> BranchAttention:
        """Let the attention of this worker compute draft trees; returns the interface to its steps."""
        raise NotImplementedError

    def branch_refusal(self) -> str:
        """Return why its model, built by now, verifies chains only; "" if it verifies trees."""
        return ""

    def kernel_report(self) -> KernelReport:
        """Return the attention of this worker, the kinds of kernels that failed their check, and its graphs."""
        compilation = self.vllm_config.compilation_config
        captured = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
        graphs = (compilation.cudagraph_capture_sizes or ()) if captured else ()
        refusal = "" if self.branches is None else self.branch_refusal()
        return KernelReport(str(self.attention), failed(), tuple(graphs), refusal, **self.model_traits)

    def adopt_sample(self, *args: Any) -> None:
        """Register a sample that has output already with the runner (see `CoupledRunnerMixin.adopt_sample`)."""
        self.model_runner.adopt_sample(*args)

    def tell_trees(self, parents: Mapping[str, Sequence[int]]) -> None:
        """Take the parents of the next step's drafts, of the samples that have branches."""
        self.model_runner.trees.told = parents

    def release_sample(self, sample_id: str) -> None:
        """Take a sample that does not run out of the runner (V2)."""
        self.model_runner.release_sample(sample_id)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights as vLLM does, into every layer.

        Raises:
            StaleLayers: vLLM has left old weights in some layers, of which it only writes a line to its log.
        """
        with stale_layers() as stale:
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        check_layers(self.model_runner.get_model(), stale)

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and create draft models before the remaining memory is given to KV."""
        super().load_model(**kwargs)  # type: ignore[misc]
        told, support = self.vllm_config.additional_config, self.model_support()
        self.drafters = {}
        # The quantized copy first: it is a copy of the target as it is without features.
        if QUANTIZED_KEY in told and support.allows(Feature.QUANTIZED):
            self.drafters[QUANTIZED] = QuantizedSelfDraft(self.model_runner, W4Options(**told[QUANTIZED_KEY]))
        if EAGLE3_KEY in told and support.allows(Feature.EAGLE3):
            with self.among_weights():
                self.drafters[EAGLE3] = Eagle3(self.model_runner, Eagle3Options(**told[EAGLE3_KEY]))
        for name in self.drafters:
            self.begin_drafter(name, 0)
            self.build_drafter(name, _AT_ONCE)

    def model_support(self) -> ModelSupport:
        """Return what is allowed for the model, which is loaded."""
        self.model_traits = {
            "kinds": kinds_of(self.get_kv_cache_spec().values()),
            "hidden_states": hasattr(self.model_runner.get_model(), "set_aux_hidden_state_layers"),
        }
        return model_support(
            engine_traits(self.vllm_config, v2=self.use_v2_model_runner, **self.model_traits)
        )

    def among_weights(self) -> AbstractContextManager[object]:
        """Return a context whose allocations sleep with the target's weights."""
        return nullcontext()

    def begin_drafter(self, name: str, version: int) -> None:
        """Prepare a draft model for the target's weights (see `ModelDrafter.begin`)."""
        self.drafters[name].begin(version)

    def build_drafter(self, name: str, seconds: float) -> bool:
        """Do a slice of that preparation; returns whether it is ready (see `ModelDrafter.build`)."""
        with set_current_vllm_config(self.vllm_config):
            return self.drafters[name].build(seconds)

    def forget_drafter(self, name: str, drop: bool) -> None:
        """Let a draft model forget the target's weights, and with `drop` free its memory."""
        drafter = self.drafters[name]
        drafter.drop() if drop else drafter.forget()

    def swap_drafter(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of a draft model (see `ModelDrafter.swap`)."""
        self.drafters[name].swap(tensors)

    def draft_tokens(self, name: str, version: int, asks: Sequence[Ask]) -> Drafted:
        """Draft tokens (see `ModelDrafter.propose`)."""
        return self.drafters[name].propose(version, asks)

    def drafter_bytes(self, name: str) -> int:
        """Return the memory of a draft model's weights, in bytes."""
        return self.drafters[name].nbytes


class CoupledCPUWorker(_CoupledWorkerMixin, CPUWorker):
    """vLLM's CPU worker. `init_device` builds its runner, so the runner's class is replaced afterwards."""

    def init_device(self) -> None:
        """Build the device state and the coupled model runner."""
        super().init_device()
        self.use_kernels()
        self.couple(self.model_runner)

    def use_branches(self) -> BranchAttention:
        """Put the attention that computes branches in copies of their blocks in the place of vLLM's."""
        # Others are spared the import of what is there on CPU only.
        from services.generation.engine.trees.cpu_attention import use_trees

        return use_trees()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights as vLLM does, and pack the output head and experts again.

        A head that is tied to the embedding has no weights of its own to load. vLLM passes it over, and its CPU
        kernel would go on with a packed copy of the old ones. Experts are packed by vLLM when they are loaded first
        only: its CPU kernel would read new ones as if they were.
        """
        super().reload_weights(*args, **kwargs)
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            elif isinstance(module, RoutedExperts) and isinstance(
                module.quant_method, UnquantizedFusedMoEMethod
            ):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        # Each layer was packed in memory of its own; steps need little of it.
        return_freed_memory()


class CoupledGPUWorker(_CoupledWorkerMixin, Worker):
    """vLLM's CUDA worker."""

    def _make_model_runner(self) -> Any:
        self.use_kernels()
        return self.couple(super()._make_model_runner())

    def use_branches(self) -> BranchAttention:
        """Let our kernel take masks, if this worker has it."""
        BRANCHES.wanted = self.attention is AttentionName.OURS
        return BRANCHES

    def branch_refusal(self) -> str:
        """Return why its model, built by now, verifies chains only; "" if it verifies trees."""
        config = self.vllm_config.compilation_config
        layers = config.static_forward_context.values()
        graphs = config.cudagraph_mode
        return worker_refusal(
            ours=all(getattr(layer.impl, "is_ours", False) for layer in layers if hasattr(layer, "impl")),
            kinds=len(self.model_runner.kv_cache_config.kv_cache_groups),
            whole_graphs=graphs is not None and graphs.mixed_mode() is CUDAGraphMode.FULL,
            fused_output=bool(config.pass_config.fuse_attn_quant),
        )

    def load_model(self, **kwargs: Any) -> None:
        """Load the model as above; draft models count as weights when vLLM sizes the KV cache."""
        super().load_model(**kwargs)
        self.model_runner.model_memory_usage += sum(map(self.drafter_bytes, self.drafters))

    def determine_available_memory(self) -> int:
        """Return vLLM's budget for KV, less what sampling a step takes beyond what vLLM has measured.

        A budget that was chosen by hand is left as it is.
        """
        budget: int = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes:
            return budget
        config, scheduler = self.vllm_config.model_config, self.vllm_config.scheduler_config
        vocab_size = config.get_vocab_size()
        needed = step_memory(
            row_capacity(scheduler.max_num_batched_tokens, vocab_size),
            scheduler.max_num_seqs,
            vocab_size,
            logit_bytes=config.dtype.itemsize,
            ranks=self.vllm_config.parallel_config.tensor_parallel_size,
            counted=not self.use_v2_model_runner,
        )
        beyond = needed.beyond(self.peak_activation_memory - self.cudagraph_memory_estimate)
        _log.info("sampling takes %d bytes beyond what vLLM measured, of %s", beyond, needed)
        return budget - beyond

    def among_weights(self) -> AbstractContextManager[object]:
        """Return the memory pool of vLLM's sleep mode, if that is on."""
        context: AbstractContextManager[object] = self._maybe_get_memory_pool_context(tag="weights")
        return context
