"""Carry out orders that need no engine: the environment, vLLM's libraries, single kernels, the kernel steps."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sysconfig
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.sizes import GpuSizes

if TYPE_CHECKING:
    import torch

    from kernels.short_query_attention import AttentionStep
    from kernels.tuning import Run
from collections.abc import Mapping, Sequence

if TYPE_CHECKING:
    from bench.gpu.kernels.steps import KernelStep

_QUERY = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem,memory.total,pcie.link.gen.max"
_RELATIVE_ERROR = 1e-2
"""Maximum relative error of a bfloat16 result against float32, in the Euclidean norm."""


class LibraryMismatch(RuntimeError):
    """A library's result differs from the float32 result."""


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """The device, "cuda" or "cpu", the model that defines heads and vocabulary, and the sizes."""

    device: str
    model: Path
    sizes: GpuSizes

    @property
    def start_seconds(self) -> float:
        """Estimated seconds until the process takes orders."""
        return 10.0

    def orders(self) -> DeviceOrders:
        """Return the orders."""
        return DeviceOrders(self)


class DeviceOrders:
    """Orders that need no engine."""

    def __init__(self, setup: DeviceSetup) -> None:
        import torch

        self._device = torch.device(setup.device)
        config = json.loads((setup.model / "config.json").read_text())
        self._config = config.get("text_config", config)
        self._sizes = setup.sizes

    def environment(self) -> dict[str, Any]:
        """Return the machine, the device and the software."""
        import torch

        from kernels.tuning import about
        from services.step_time.machine import gpu_count

        found: dict[str, Any] = {
            **about(self._device),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "cores": len(os.sched_getaffinity(0)),
            "gpus": gpu_count(),
            # Triton compiles a launcher in C for each kernel, against Python's headers.
            "c_compiler": next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
            "python_headers": Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
            "nvcc": shutil.which("nvcc"),
            "model": {
                name: self._config.get(name)
                for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
            },
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            properties = torch.cuda.get_device_properties(self._device)
            found |= {
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory": total,
                "free": free,
                "nvidia_smi": _nvidia_smi(),
            }
        return found

    def norm(self) -> dict[str, Any]:
        """Compare vLLM's RMSNorm, a kernel of its main library, with float32. LibraryMismatch if it differs."""
        import torch
        import vllm._custom_ops  # noqa: F401

        size = int(self._config["hidden_size"])
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        rows = torch.randn(64, size, device=self._device, dtype=dtype)
        weight = torch.rand(size, device=self._device, dtype=dtype)
        made = torch.empty_like(rows)
        torch.ops._C.rms_norm(made, rows, weight, 1e-6)
        exact = torch.nn.functional.rms_norm(rows.float(), (size,), weight.float(), 1e-6)
        return {"error": _compared("RMSNorm", made, exact)}

    def flash_attention(self) -> dict[str, Any]:
        """Compare vLLM's attention, in the version used here, with float32. LibraryMismatch if it differs."""
        from kernels.short_query_attention import attend
        from kernels.short_query_attention.attend import attend_reference
        from kernels.short_query_attention.race import random_step, vllm_own_attention

        shape = replace(self._shape(), context=min(700, max(self._sizes.contexts)), drafts=4)
        step = random_step(self._device, shape, "even", 8, drafted=4)
        # A CPU has no such kernel.
        run: Run = vllm_own_attention(step) if self._device.type == "cuda" else lambda: attend(step)
        made = run()
        wide = replace(step, query=step.query.float(), keys=step.keys.float(), values=step.values.float())
        return {"error": _compared("attention", made, attend_reference(wide))}

    def attention(self) -> dict[str, Any]:
        """Time the attention backends for the model's heads, and return which one an engine would use."""
        from kernels.short_query_attention.race import AttentionName, backends, fastest, race

        shape = replace(self._shape(), requests=max(self._sizes.rows))
        makers = backends(ours=True)
        if self._device.type != "cuda":
            # On a CPU, use PyTorch's own attention over the same cache, which interprets no kernel.
            makers = {AttentionName.OURS: _plain_attention}
        timings = list(race(self._device, shape, makers))
        return {"timings": [asdict(each) for each in timings], "fastest": fastest(timings)}

    def _shape(self) -> Any:
        from kernels.short_query_attention.race import AttentionShape

        heads = int(self._config["num_attention_heads"])
        return AttentionShape(
            heads=heads,
            kv_heads=int(self._config.get("num_key_value_heads") or heads),
            head_size=int(self._config.get("head_dim") or self._config["hidden_size"] // heads),
            context=min(4096, max(self._sizes.contexts)),
            long=max(self._sizes.contexts),
        )


def _compared(what: str, found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error of a result. LibraryMismatch if it is too large or not a number."""
    error = ((found.float() - exact.float()).norm() / exact.float().norm()).item()
    if not error < _RELATIVE_ERROR:
        raise LibraryMismatch(f"{what} is off by {error:.3g} of the norm, more than {_RELATIVE_ERROR}")
    return error


def _plain_attention(step: AttentionStep) -> Run:
    from kernels.short_query_attention import attend

    return lambda: attend(step, backend="reference")


def _nvidia_smi() -> dict[str, str] | str:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return dict(zip(_QUERY.split(","), map(str.strip, said.splitlines()[0].split(",")), strict=False))


@dataclass(frozen=True, slots=True)
class KernelSetup:
    """The device, "cuda" or "cpu", and the folder for tuned parameters."""

    device: str
    tuned: Path

    @property
    def start_seconds(self) -> float:
        """Estimated seconds until the process takes orders."""
        return 10.0

    def orders(self) -> KernelOrders:
        """Return the orders; without a device kernels run in Triton's interpreter."""
        if self.device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        from bench.gpu.kernels.steps import kernel_steps
        from kernels import backend

        backend.use("triton")
        return KernelOrders(self, kernel_steps(self.device))


class KernelOrders:
    """Kernel steps by name."""

    def __init__(self, setup: KernelSetup, steps: Sequence[KernelStep]) -> None:
        self._setup = setup
        self._steps = {step.name: step for step in steps}

    def step(
        self, name: str, ceilings: Mapping[str, float] | None, values: Mapping[str, Any], wrong: Sequence[str]
    ) -> dict[str, Any]:
        """Run a step.

        Args:
            name: name of the step.
            ceilings: result of the ceilings step; None if it has not been run, or failed.
            values: launch parameters that were swept so far.
            wrong: checks with these parameters that have not passed.
        """
        import gc

        import torch

        from bench.gpu.kernels.steps import KernelBench
        from kernels.tuning import Tuning, using

        device = torch.device(self._setup.device, 0) if self._setup.device == "cuda" else torch.device("cpu")
        bench = KernelBench(device, self._setup.tuned, ceilings, values, wrong)
        with using(Tuning(**values)):
            found = self._steps[name].run(bench)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            # An error of a launched kernel appears here, and belongs to this step.
            torch.cuda.synchronize()
        return found
