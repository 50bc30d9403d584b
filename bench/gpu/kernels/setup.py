"""Set up the process that runs the kernel steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu.kernels.steps import KernelStep


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
