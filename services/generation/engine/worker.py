"""Workers for vLLM: vLLM's own CPU and GPU workers, with our model runner, draft models and kernels in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.device_allocator import get_mem_allocator_instance
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from services.generation.engine.attention_backend import use_attention
from services.generation.engine.draft_forms import WorkerForm, form_in
from services.generation.engine.draft_models.interface import DraftModel
from services.generation.engine.draft_models.kinds import KINDS
from services.generation.engine.kernel_choice import KernelReport, failed, use_kernels
from services.generation.engine.model_support import Feature, ModelSupport, model_support
from services.generation.engine.recurrent_states import with_spare_states
from services.generation.engine.runner import coupled
from services.generation.engine.step_sizes import row_capacity, step_memory
from services.generation.engine.traits import engine_traits, kinds_of
from services.generation.engine.types import INVARIANCE_KEY, KERNELS_KEY, DraftRequest, DraftResult
from services.generation.kv_transfer.port import KvWorkerMixin
from services.platform.memory import return_freed_memory

_log = logging.getLogger(__name__)
LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
MESSAGE = "%s: Failed to load weights"
"""Log message of vLLM for a layer that keeps its old weights; the argument is the layer's class."""
# The first build of a draft model is not divided into slices.
_AT_ONCE = float("inf")


class StaleLayers(RuntimeError):
    """Layers still have old weights; the engine must not serve."""


class _CoupledWorkerMixin(KvWorkerMixin):
    """Methods of a worker beyond vLLM's own interface."""

    model_runner: Any
    vllm_config: Any
    device: Any
    drafters: dict[str, DraftModel]
    use_v2_model_runner: bool
    on_cpu = False
    # None if drafts are chains.
    form: WorkerForm | None
    # Fields of `EngineTraits` that are known only once the model is loaded.
    model_traits: dict[str, Any]

    def couple(self, runner: Any) -> Any:
        """Return the runner with our sampler in it."""
        if self.use_v2_model_runner:
            # Imported late, because V1 does not need V2.
            from services.generation.engine.v2.runner import coupled_v2

            runner.__class__ = coupled_v2(type(runner))
        else:
            runner.__class__ = coupled(type(runner))
        runner.init_coupled()
        runner.draft_form = self.form
        return runner

    def use_kernels(self) -> None:
        """Choose the kernels of this process (`kernel_choice.use_kernels`, `attention_backend.use_attention`)."""
        config = self.vllm_config
        form = form_in(config.additional_config)
        use_kernels(config.additional_config.get(KERNELS_KEY, "auto"), self.device)
        self.attention = use_attention(config, self.device, masks=form is not None)
        self.form = None if form is None else form.in_worker(self, cpu=self.on_cpu)

    def kernel_report(self) -> KernelReport:
        """Return the attention of this worker, the kinds of kernels that failed their check, and its graphs."""
        compilation = self.vllm_config.compilation_config
        captured = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
        graphs = (compilation.cudagraph_capture_sizes or ()) if captured else ()
        refusal = "" if self.form is None else self.form.refusal()
        return KernelReport(str(self.attention), failed(), tuple(graphs), refusal, **self.model_traits)

    def adopt_sample(self, *args: Any) -> None:
        """Register a sample that has output already with the runner (see `CoupledRunnerMixin.adopt_sample`)."""
        self.model_runner.adopt_sample(*args)

    def set_form(self, known: Any) -> None:
        """Set what the next step's drafts have beyond their tokens (see `CoreForm.put`)."""
        self.model_runner.draft_form.put(known)

    def release_sample(self, sample_id: str) -> None:
        """Remove a sample that is not running from the runner (V2)."""
        self.model_runner.release_sample(sample_id)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights as vLLM does, and check that every layer got them.

        vLLM replaces weights layer by layer, as each layer's loader is called. The loaders of some models bypass
        this, and vLLM then restores the old weights (GPT-OSS keeps its experts and sinks) and only logs it.

        Raises:
            StaleLayers: some layers still have old weights.
        """
        with stale_layers() as stale:
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        check_layers(self.model_runner.get_model(), stale)

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and create draft models before the remaining memory is given to KV."""
        super().load_model(**kwargs)  # type: ignore[misc]
        options, support = self.vllm_config.additional_config, self.model_support()
        self.drafters = {}
        for kind in sorted(KINDS, key=lambda each: not each.copies_target):
            if kind.key in options and support.allows(kind.feature):
                with self.among_weights() if kind.among_weights else nullcontext():
                    self.drafters[kind.name] = kind.build(self.model_runner, options[kind.key])
        for name in self.drafters:
            self.begin_drafter(name, 0)
            self.build_drafter(name, _AT_ONCE)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return vLLM's specs of all layers, with room for copies of recurrent states if samples are drafted."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        drafted = not self.use_v2_model_runner and self.model_support().allows(Feature.DRAFTS)
        return with_spare_states(specs) if drafted else specs

    def model_support(self) -> ModelSupport:
        """Return the features that are allowed for the loaded model."""
        self.model_traits = {
            "kinds": kinds_of(self.model_runner.get_kv_cache_spec().values()),
            "hidden_states": hasattr(self.model_runner.get_model(), "set_aux_hidden_state_layers"),
        }
        return model_support(
            engine_traits(self.vllm_config, v2=self.use_v2_model_runner, **self.model_traits)
        )

    def among_weights(self) -> AbstractContextManager[object]:
        """Return a context whose allocations sleep with the target's weights."""
        return nullcontext()

    def begin_drafter(self, name: str, version: int) -> None:
        """Prepare a draft model for the target's weights (see `DraftModel.begin`)."""
        self.drafters[name].begin(version)

    def build_drafter(self, name: str, seconds: float) -> bool:
        """Do a slice of that preparation; returns whether it is ready (see `DraftModel.build`)."""
        with set_current_vllm_config(self.vllm_config):
            return self.drafters[name].build(seconds)

    def forget_drafter(self, name: str, drop: bool) -> None:
        """Have a draft model forget the target's weights, and with `drop` free its memory."""
        drafter = self.drafters[name]
        drafter.drop() if drop else drafter.forget()

    def swap_drafter(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of a draft model (see `DraftModel.swap`)."""
        self.drafters[name].swap(tensors)

    def draft_tokens(self, name: str, version: int, requests: Sequence[DraftRequest]) -> DraftResult:
        """Draft tokens (see `DraftModel.propose`)."""
        return self.drafters[name].propose(version, requests)

    def drafter_bytes(self, name: str) -> int:
        """Return the memory of a draft model's weights, in bytes."""
        return self.drafters[name].nbytes


class CoupledCPUWorker(_CoupledWorkerMixin, CPUWorker):
    """vLLM's CPU worker. `init_device` builds its runner, so the runner's class is replaced afterwards."""

    on_cpu = True

    def init_device(self) -> None:
        """Build the device state and the coupled model runner."""
        super().init_device()
        self.use_kernels()
        self.couple(self.model_runner)

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and make its logits independent of the batch if that is wanted."""
        super().load_model(**kwargs)
        if self.vllm_config.additional_config.get(INVARIANCE_KEY):
            # Imported late, because only a CPU worker can import it.
            from services.generation.engine.invariance.model import make_invariant

            make_invariant(self.model_runner.get_model(), self.vllm_config)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights as vLLM does, and pack the output head and experts again.

        vLLM skips a head that is tied to the embedding, because it has no weights to load, and its CPU kernel would
        keep a packed copy of the old ones. vLLM packs experts only at their first load, and its CPU kernel would
        read new, unpacked ones as if they were packed.
        """
        super().reload_weights(*args, **kwargs)
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            elif isinstance(module, RoutedExperts) and isinstance(
                module.quant_method, UnquantizedFusedMoEMethod
            ):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        # Packing allocates memory for each layer, of which steps need little.
        return_freed_memory()


class CoupledGPUWorker(_CoupledWorkerMixin, Worker):
    """vLLM's CUDA worker."""

    def _make_model_runner(self) -> Any:
        self.use_kernels()
        return self.couple(super()._make_model_runner())

    def load_model(self, **kwargs: Any) -> None:
        """Load the model and draft models; both count as weights when vLLM sizes the KV cache."""
        super().load_model(**kwargs)
        self.model_runner.model_memory_usage += sum(map(self.drafter_bytes, self.drafters))

    def determine_available_memory(self) -> int:
        """Return vLLM's budget for KV, minus the memory of sampling a step beyond what vLLM has measured.

        A budget that was configured is not changed.
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
        if not self.vllm_config.model_config.enable_cumem_allocator:
            return nullcontext()
        # Not vLLM's own method for the tag: it asserts that the pool is empty, and the target is in it.
        context: AbstractContextManager[object] = get_mem_allocator_instance().use_memory_pool(tag="weights")
        return context


@contextmanager
def stale_layers() -> Iterator[set[str]]:
    """Collect the classes of layers whose old weights vLLM restores within the context, from vLLM's log."""
    names, logger = set[str](), logging.getLogger(LOGGER)

    def listen(record: logging.LogRecord) -> bool:
        if record.msg == MESSAGE and isinstance(record.args, tuple):
            names.add(str(record.args[0]))
        return True

    level = logger.level
    logger.addFilter(listen)
    if not logger.isEnabledFor(logging.WARNING):
        logger.setLevel(logging.WARNING)
    try:
        yield names
    finally:
        logger.removeFilter(listen)
        logger.setLevel(level)


def check_layers(model: nn.Module, stale: set[str]) -> None:
    """Raise StaleLayers if a layer of the `stale` classes has weights that no other layer loaded.

    Other layers of these classes are harmless: they have only the weights of another layer, such as a tied head, or
    computed tables, such as rotary embeddings.
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
