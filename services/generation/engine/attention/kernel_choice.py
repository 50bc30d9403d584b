"""Choose the kernels of a worker: Triton's if they run and their results are right, else the references."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from kernels.backend import Backend, choose, in_use, use
from kernels.selfcheck import check_kernels

_log = logging.getLogger(__name__)
SAMPLER, ATTENTION = "sampler", "attention"
"""Kinds of kernels that a failed check leaves out: those that every engine uses, and attention."""


class KernelReport(NamedTuple):
    """Kernels of a worker: the attention that it has, and the kinds that failed their check.

    `graphs` are the numbers of tokens for which it captured CUDA graphs, rising. `refusal` says why it verifies no
    draft trees though they are wanted; "" otherwise. `kinds` and `hidden_states` are those of `EngineTraits`.
    """

    attention: str
    failed: tuple[str, ...]
    graphs: tuple[int, ...]
    refusal: str = ""
    kinds: frozenset[str] = frozenset()
    hidden_states: bool = False


_failed: dict[str, None] = {}


def failed() -> tuple[str, ...]:
    """Return the kinds of kernels that failed their check in this process, and are left out."""
    return tuple(_failed)


def leave_out(kind: str, error: Exception) -> None:
    """Note that a kind of kernels failed its check; an error to be seen, for serving goes on without them."""
    _failed[kind] = None
    _log.error("kernels_left_out: %s: %s: %s", kind, type(error).__name__, error)


def use_kernels(wanted: str, device: torch.device) -> Backend:
    """Set the switch of all kernels in this process, and return what it is set to.

    With `auto`, kernels that do not compile here, or do not give the references' results, are left for the
    references, which take all logits to the host: see `failed`. With `triton` that is an error, the kernels' own,
    or BackendUnavailable where they cannot run.
    """
    _failed.clear()
    use(wanted)
    if choose(device) is Backend.TRITON:
        try:
            check_kernels(device)
        except Exception as error:  # A compiler's errors are of many kinds.
            if in_use() is Backend.TRITON:
                raise
            leave_out(SAMPLER, error)
            use(Backend.REFERENCE)
    return in_use()
