"""The workers that vLLM is told to use: its own, with our model runner in them."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from services.generation.engine.runner import coupled


class _CoupledWorkerMixin:
    """What our engine asks of a worker beyond vLLM's own interface."""

    model_runner: Any

    def adopt_sample(self, *args: Any) -> None:
        """Make a sample with prior output known to the runner (see `CoupledRunnerMixin.adopt_sample`)."""
        self.model_runner.adopt_sample(*args)


class CoupledCPUWorker(_CoupledWorkerMixin, CPUWorker):
    """vLLM's CPU worker. It builds its runner inside `init_device`, so the runner is re-classed after it."""

    def init_device(self) -> None:
        """Build the device state and the coupled model runner."""
        super().init_device()
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
        runner = super()._make_model_runner()
        runner.__class__ = coupled(type(runner))
        runner.init_coupled()
        return runner
