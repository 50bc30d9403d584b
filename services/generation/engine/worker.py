"""The workers that vLLM is told to use: its own, with our model runner in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from services.generation.engine.draft_rows import Ask
from services.generation.engine.kernel_choice import use_kernels
from services.generation.engine.kv_worker import KvWorkerMixin
from services.generation.engine.model_drafter import ModelDrafter, StaleDrafter
from services.generation.engine.runner import coupled
from services.generation.engine.self_w4 import SelfW4
from services.generation.engine.types import KERNELS_KEY, SELF_W4_KEY, Proposal, W4Options

# No slice of the first build is waited for.
_AT_ONCE = float("inf")


class _CoupledWorkerMixin(KvWorkerMixin):
    """What our engine asks of a worker beyond vLLM's own interface."""

    model_runner: Any
    vllm_config: Any
    device: Any
    drafter: ModelDrafter | None

    def use_kernels(self) -> None:
        """Choose what computes in this process (see `kernel_choice.use_kernels`)."""
        use_kernels(self.vllm_config.additional_config.get(KERNELS_KEY, "auto"), self.device)

    def adopt_sample(self, *args: Any) -> None:
        """Make a sample with prior output known to the runner (see `CoupledRunnerMixin.adopt_sample`)."""
        self.model_runner.adopt_sample(*args)

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and make the drafter that has its own: before what is left is given to KV."""
        super().load_model(**kwargs)  # type: ignore[misc]
        options = self.vllm_config.additional_config.get(SELF_W4_KEY)
        self.drafter = None if options is None else SelfW4(self.model_runner, W4Options(**options))
        if self.drafter is not None:
            self.begin_drafter(0)
            self.build_drafter(_AT_ONCE)

    def begin_drafter(self, version: int) -> None:
        """Begin to make the drafter for these weights (see `ModelDrafter.begin`)."""
        if self.drafter is not None:
            self.drafter.begin(version)

    def build_drafter(self, seconds: float) -> bool:
        """A slice of making the drafter; whether it is ready (see `ModelDrafter.build`)."""
        if self.drafter is None:
            return False
        with set_current_vllm_config(self.vllm_config):
            return self.drafter.build(seconds)

    def forget_drafter(self, drop: bool) -> None:
        """The drafter is not for the weights any more that are to come; with `drop` its memory is given back."""
        if self.drafter is not None:
            self.drafter.drop() if drop else self.drafter.forget()

    def draft_tokens(self, version: int, asks: Sequence[Ask]) -> dict[str, Proposal]:
        """Draft tokens (see `ModelDrafter.propose`)."""
        if self.drafter is None:
            raise StaleDrafter("there is no drafter")
        return self.drafter.propose(version, asks)

    def drafter_bytes(self) -> int:
        """Memory of the drafter, in bytes."""
        return 0 if self.drafter is None else self.drafter.nbytes


class CoupledCPUWorker(_CoupledWorkerMixin, CPUWorker):
    """vLLM's CPU worker. It builds its runner inside `init_device`, so the runner is re-classed after it."""

    def init_device(self) -> None:
        """Build the device state and the coupled model runner."""
        super().init_device()
        self.use_kernels()
        self.model_runner.__class__ = coupled(type(self.model_runner))
        self.model_runner.init_coupled()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, with the output head packed anew.

        A head that is tied to the embedding has no weights of its own to load. vLLM passes it over, and its CPU
        kernel would go on with a packed copy of the old ones.
        """
        super().reload_weights(*args, **kwargs)
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


class CoupledGPUWorker(_CoupledWorkerMixin, Worker):
    """vLLM's CUDA worker."""

    def _make_model_runner(self) -> Any:
        self.use_kernels()
        runner = super()._make_model_runner()
        runner.__class__ = coupled(type(runner))
        runner.init_coupled()
        return runner

    def load_model(self, **kwargs: Any) -> None:
        """As above; the drafter counts as weights where vLLM works out what is left for KV."""
        super().load_model(**kwargs)
        self.model_runner.model_memory_usage += self.drafter_bytes()
