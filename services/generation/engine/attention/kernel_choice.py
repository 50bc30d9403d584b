"""Choose the kernels of a worker: Triton's if they run and their results are right, else the references."""

from __future__ import annotations

import logging

import torch

from kernels.backend import Backend, choose, in_use, use
from kernels.selfcheck import check_kernels

_log = logging.getLogger(__name__)


def use_kernels(wanted: str, device: torch.device) -> Backend:
    """Set the switch of all kernels in this process, and return what it is set to.

    With `auto`, kernels that do not compile here, or do not give the references' results, are left for the
    references; with `triton` that is an error, the kernels' own, or BackendUnavailable where they cannot run.
    """
    use(wanted)
    if choose(device) is Backend.TRITON:
        try:
            check_kernels(device)
        except Exception as error:  # A compiler's errors are of many kinds.
            if in_use() is Backend.TRITON:
                raise
            _log.warning("the Triton kernels are left out: %s: %s", type(error).__name__, error)
            use(Backend.REFERENCE)
    return in_use()
