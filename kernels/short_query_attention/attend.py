"""Attention of a step whose requests decode one token or verify a few drafts each."""

from __future__ import annotations

import torch

from kernels.backend import Backend, choose
from kernels.short_query_attention.inputs import AttentionStep
from kernels.short_query_attention.reference import attend_reference


def attend(step: AttentionStep, *, backend: Backend | str | None = None) -> torch.Tensor:
    """softmax(scale * q k) v over what each query token sees: [T, Hq, D] in the query's dtype.

    Sums are float32. The lengths of all requests decide where contexts are cut into parts that are summed up, and
    so how a result is rounded, and nothing else of it. `backend`: see kernels/backend.py.

    ValueError for inputs that do not fit (see AttentionStep). Values in device memory are trusted, but for
    positions outside the block table, which are not read.
    """
    step.check()
    if choose(step.query.device, backend) is Backend.REFERENCE:
        return attend_reference(step)
    from kernels.short_query_attention.triton_attend import attend_triton

    return attend_triton(step)
