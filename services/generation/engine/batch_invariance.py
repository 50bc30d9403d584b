"""vLLM's batch-invariant mode: a row's logits are the same to the bit whatever else is in its batch.

Read by vLLM when it is imported, in this process and in those that it starts. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
import sys

INVARIANCE_VARIABLE = "VLLM_BATCH_INVARIANT"
LEAST_CAPABILITY = (8, 0)
"""Compute capability of a device from which on vLLM 0.32 has kernels for it."""


def choose_invariance(wanted: bool) -> None:
    """Switch the mode on, if it is wanted, for the engine that this process will build.

    Raises:
        RuntimeError: vLLM was imported without it.
    """
    if not wanted or os.environ.get(INVARIANCE_VARIABLE) == "1":
        return
    if "vllm" in sys.modules:
        raise RuntimeError("batch_invariant has to be chosen before vLLM is imported")
    os.environ[INVARIANCE_VARIABLE] = "1"


def invariance_refusal(wanted: bool, capability: tuple[int, int] | None) -> str:
    """Return why an engine cannot be built in the mode; "" if it can, or is not to be.

    Args:
        wanted: the option.
        capability: compute capability of the device; None: it is no CUDA device.
    """
    if not wanted:
        return ""
    least = ".".join(map(str, LEAST_CAPABILITY))
    needed = f"it needs a CUDA device of compute capability {least} or above"
    if capability is None:
        return f"batch_invariant: {needed}, and on CPU vLLM has no such kernels"
    if capability < LEAST_CAPABILITY:
        return f"batch_invariant: {needed}, and this one has {'.'.join(map(str, capability))}"
    if os.environ.get(INVARIANCE_VARIABLE) != "1":
        return "batch_invariant: call choose_invariance before vLLM is imported"
    return ""
