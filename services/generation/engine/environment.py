"""Set up what vLLM reads when it is imported, and refuse options that an engine cannot have.

vLLM reads its environment when it is imported, in this process and in the processes that it starts. Nothing here
imports vLLM or torch, so the launcher and the configuration can ask without an engine.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.generation.engine.draft_models.kinds import wanted
from services.generation.engine.types import EngineOptions
from services.step_time.machine import on_cpu

AUTO, V1, V2 = "auto", "v1", "v2"
"""Values of the option `engine`."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
INVARIANCE_VARIABLE = "VLLM_BATCH_INVARIANT"
LEAST_CAPABILITY = (8, 0)
"""Lowest compute capability for which vLLM 0.32 has batch-invariant kernels."""
_VARIABLES = {
    # The executor is in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    RUNNER_VARIABLE: "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Matrix products that oneDNN has compiled, one for each shape and number of rows of the steps so far. Each
    # takes about 0.3 MiB, and oneDNN keeps 1,024 by default. vLLM keeps 32 of each layer in addition.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}


def set_variables() -> None:
    """Set the variables that vLLM reads when it is imported and when an engine is built; existing values stay.

    A process that was forked after vLLM was imported may have a different environment.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    # By default torch loads compiled code from a temporary folder, which any user could have created before. It
    # creates the folder when it is imported. Without a writable home folder, torch's default stays.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        with suppress(RuntimeError, OSError):
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "paceline/inductor")
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def runner_of(engine: str) -> str:
    """Return V1 or V2: `auto` is V1 until V2 has been measured to be faster on a GPU."""
    return V2 if engine == V2 else V1


def runner_refusal(options: EngineOptions) -> str:
    """Return why an engine with these options cannot be built on V2; "" if it can, or if V1 is chosen."""
    if runner_of(options.engine) == V1:
        return ""
    reasons = (
        *((True, f"{kind.words} drafts on V1 only") for kind in wanted(options)),
        (not options.coupled, "vLLM's own sampler is available on V1 only, for comparison"),
    )
    return next((f"engine v2: {reason}" for applies, reason in reasons if applies), "")


def choose_runner(engine: str) -> None:
    """Set the runner of the engine that this process will build.

    Raises:
        RuntimeError: V2 is chosen on CPU, and vLLM has been imported already.
    """
    chosen = runner_of(engine)
    os.environ[RUNNER_VARIABLE] = "1" if chosen == V2 else "0"
    if chosen == V2 and on_cpu():
        if interpreter_installed():
            return
        if "vllm" in sys.modules:
            raise RuntimeError("engine v2 on CPU must be chosen before vLLM is imported")
        install_interpreter()


def check_runner(engine: str) -> None:
    """Raise RuntimeError if vLLM in this process will not use the runner that `engine` names."""
    wanted = "1" if runner_of(engine) == V2 else "0"
    if os.environ.get(RUNNER_VARIABLE) != wanted:
        raise RuntimeError(f"engine {engine}: call choose_runner before vLLM is imported")


class _InterpreterDriver:
    """Driver of a Triton backend that compiles nothing."""

    @staticmethod
    def is_active() -> bool:
        """Return True: vLLM counts active drivers."""
        return True


def interpreter_installed() -> bool:
    """Return whether `install_interpreter` was called in this process, or in the one it was forked from."""
    if "triton" not in sys.modules:
        return False
    from triton import backends  # type: ignore[import-untyped]

    return getattr(backends.backends.get("cpu"), "driver", None) is _InterpreterDriver


def install_interpreter() -> None:
    """Make Triton's interpreter the backend of this process. Call it before Triton and vLLM are imported.

    V2's bookkeeping is a dozen Triton kernels; with the interpreter V2 runs on CPU, for tests. vLLM considers
    Triton missing on CPU unless there is a backend named "cpu", which the released Triton does not have. With one
    that reports to be active, vLLM defines its kernels, and the interpreter runs them as NumPy. That is too slow
    to serve with.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    # Otherwise torch asks the backend for its compilation target.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from triton import backends
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    backends.backends["cpu"] = SimpleNamespace(driver=_InterpreterDriver, compiler=None)
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        """Return a mask of booleans: `&` of two scalars gives integers, which NumPy would use as indices."""
        return (
            mask if mask.data.dtype == bool else interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
        )

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, boolean(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, boolean(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def choose_invariance(wanted: bool) -> None:
    """Switch vLLM's batch-invariant mode on, if it is wanted, for the engine that this process will build.

    In this mode a row's logits are the same to the bit whatever else is in its batch. vLLM has none on CPU, where
    the worker makes the model invariant (invariance/).

    Raises:
        RuntimeError: vLLM has been imported without it.
    """
    if not wanted or on_cpu() or os.environ.get(INVARIANCE_VARIABLE) == "1":
        return
    if "vllm" in sys.modules:
        raise RuntimeError("batch_invariant must be chosen before vLLM is imported")
    os.environ[INVARIANCE_VARIABLE] = "1"


def invariance_refusal(wanted: bool, capability: tuple[int, int] | None) -> str:
    """Return why vLLM has no batch-invariant mode for an engine; "" if it has, or if the mode is not wanted.

    Args:
        wanted: the option `batch_invariant`.
        capability: compute capability of the device; None if it is not a CUDA device.
    """
    if not wanted:
        return ""
    least = ".".join(map(str, LEAST_CAPABILITY))
    needed = f"it needs a CUDA device of compute capability {least} or above"
    if capability is None:
        return f"batch_invariant: {needed}, or a CPU"
    if capability < LEAST_CAPABILITY:
        return f"batch_invariant: {needed}, but this one has {'.'.join(map(str, capability))}"
    if os.environ.get(INVARIANCE_VARIABLE) != "1":
        return "batch_invariant: call choose_invariance before vLLM is imported"
    return ""


def cpu_invariance_refusal(options: EngineOptions) -> str:
    """Return why an engine on CPU cannot be built with `batch_invariant`; "" if it can, or if that is not wanted.

    The model and the processor are checked when the model is loaded (invariance/model.py).
    """
    models = [kind.name for kind in wanted(options)]
    reasons = (
        (not options.coupled, "vLLM's own runner has none on CPU: leave batch_invariant out"),
        (runner_of(options.engine) == V2, "on CPU it needs engine v1"),
        (options.tensor_parallel_size > 1, "on CPU it needs tensor_parallel_size 1"),
        (
            options.enforce_eager is False,
            "on CPU it needs layers that are not compiled: leave enforce_eager out",
        ),
        (options.trees, "on CPU branches of drafts are computed apart: set max_branches to 0"),
        (bool(models), f"on CPU it is not known beside draft models: leave {' and '.join(models)} out"),
    )
    found = next((reason for applies, reason in reasons if applies), "")
    return f"batch_invariant: {found}" if options.batch_invariant and found else ""


def parallelism_refusal(*, tensor: int, experts: bool, pipeline: int, data: int) -> tuple[str, str]:
    """Return the option that is refused, and why; two empty strings if none is.

    Tensor parallelism divides every layer; alternatively each rank has whole experts. Either way every rank has all
    layers of a token and all logits, and the samplers of all ranks pick the same token. Other kinds of parallelism
    are refused.

    Args:
        tensor: ranks of tensor parallelism.
        experts: True if each rank has whole experts.
        pipeline: stages of a pipeline.
        data: replicas within one engine.
    """
    reasons = (
        (
            pipeline > 1,
            "pipeline_parallel_size",
            "an instance steps one batch at a time, so the stages of a pipeline would wait for one another, and KV "
            "moves between ranks that have every layer: use tensor_parallel_size",
        ),
        (
            data > 1,
            "data_parallel_size",
            "replicas within an engine step in lockstep, each for the longest of all, and place samples "
            "themselves: use more instances, among which the gateway places samples and moves them",
        ),
        (
            experts and tensor == 1,
            "enable_expert_parallel",
            "experts are divided among the ranks of tensor_parallel_size, which is 1",
        ),
    )
    return next(((option, reason) for applies, option, reason in reasons if applies), ("", ""))
