"""Launches the sampler's kernels: thresholds where there are masks, the scan, and the finish."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton

from kernels.coupled_sampler.bounds import WORD_THRESHOLDS
from kernels.coupled_sampler.noise import Domain
from kernels.coupled_sampler.triton_finish import finish
from kernels.coupled_sampler.triton_scan import scan
from kernels.coupled_sampler.triton_threshold import thresholds

BLOCK = 1024
"""Entries that are tested, and given noise, together: eight for each of 128 threads."""
SEARCH_BLOCK = 512
PROGRAMS_WANTED = 528
"""Four for each multiprocessor of a large GPU: rows are cut into pieces until there are as many."""
MOST_PIECES = 64


def sample_triton(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    drafts: torch.Tensor,
    cu_rows: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    domain: Domain,
    programs_wanted: int = PROGRAMS_WANTED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, counts, logprobs, processed) of sample.Sampled; arguments checked by its `sample`."""
    rows, width = logits.shape
    device, requests = logits.device, len(cu_rows) - 1
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    counts = torch.empty(requests, dtype=torch.int64, device=device)
    raw, processed = torch.empty(2, rows, dtype=torch.float32, device=device)
    if rows == 0:
        return tokens, counts, raw, processed
    seeds, positions, temperature, drafts = (
        vector.contiguous() for vector in (seeds, positions, temperature, drafts)
    )
    owners = torch.repeat_interleave(torch.arange(requests), cu_rows.diff()).to(device)
    first_rows = cu_rows.to(device)
    masked = top_k is not None or top_p is not None
    lowest = torch.empty(rows if masked else 1, dtype=torch.float32, device=device)
    if masked:
        thresholds[(rows,)](
            logits, logits.stride(0), width, owners, temperature,
            temperature if top_k is None else top_k.to(torch.int64).contiguous(),
            temperature if top_p is None else top_p.contiguous(), lowest,
            TOP_K=top_k is not None, TOP_P=top_p is not None, BLOCK=SEARCH_BLOCK,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    blocks = triton.cdiv(width, BLOCK)
    wanted = max(1, min(MOST_PIECES, blocks, programs_wanted // rows))
    piece = triton.cdiv(blocks, wanted) * BLOCK
    pieces = triton.cdiv(width, piece)
    floats = torch.empty(5, rows, pieces, dtype=torch.float32, device=device)
    best, *sums = floats
    found, bad = torch.empty(2, rows, pieces, dtype=torch.int32, device=device)
    scan[(rows, pieces)](
        logits, logits.stride(0), width, owners, seeds, positions, temperature, first_rows, lowest,
        _word_table(device), int(domain), best, found, bad, *sums, piece, pieces,
        MASKED=masked, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    finish[(requests,)](
        logits, logits.stride(0), first_rows, drafts, positions, temperature, best, found, bad, *sums,
        tokens, counts, raw, processed, pieces, PIECES=triton.next_power_of_2(pieces),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, counts, raw, processed


@cache
def _word_table(device: torch.device) -> torch.Tensor:
    """bounds.WORD_THRESHOLDS on a device."""
    return torch.from_numpy(WORD_THRESHOLDS.astype(np.int64)).to(device)
