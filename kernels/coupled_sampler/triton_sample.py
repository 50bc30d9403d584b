"""Launches the sampler's kernels: thresholds where there are masks, the scan, and the finish."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton

from kernels.coupled_sampler import triton_threshold as search
from kernels.coupled_sampler.bounds import WORD_THRESHOLDS
from kernels.coupled_sampler.noise import Domain
from kernels.coupled_sampler.triton_finish import MOST_PIECES, finish
from kernels.coupled_sampler.triton_scan import scan
from kernels.tuning import Tuning, multiprocessors, tuning


def sample_triton(
    logits: torch.Tensor,
    vectors: dict[str, torch.Tensor],
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    out: dict[str, torch.Tensor],
    domain: Domain,
) -> None:
    """Write `out`, as sample.Sampled has it; arguments checked by its `sample`, all on the device of the logits.

    `vectors`: seeds, positions, temperature, drafts, first_rows [N + 1], owners [R], each contiguous.
    """
    rows, width = logits.shape
    if rows == 0:
        return
    chosen, device = tuning(logits.device), logits.device
    seeds, positions, temperature, drafts, first_rows, owners = (
        vectors[name] for name in ("seeds", "positions", "temperature", "drafts", "first_rows", "owners")
    )
    masked = top_k is not None or top_p is not None
    lowest = torch.empty(rows, dtype=torch.float32, device=device) if masked else temperature
    if masked:
        thresholds(logits, owners, temperature, top_k, top_p, lowest)
    blocks, pieces = pieces_of(rows, width, chosen.scan_block, chosen.scan_programs, device)
    # Rows are as far apart as they can be, not as there are pieces: a kernel is compiled for every alignment.
    best, *sums = torch.empty(5, rows, MOST_PIECES, dtype=torch.float32, device=device)
    found = torch.empty(rows, MOST_PIECES, dtype=torch.int32, device=device)
    scan[(rows, pieces)](
        logits, logits.stride(0), width, owners, seeds, positions, temperature, first_rows, lowest,
        _word_table(device), int(domain), best, found, *sums, blocks, MOST_PIECES,
        MASKED=masked, BLOCK=chosen.scan_block, STAGES=chosen.scan_stages, WIDE=chosen.wide_products,
        num_warps=chosen.scan_warps, enable_fp_fusion=False,
    )  # fmt: skip
    finish[(len(first_rows) - 1,)](
        logits, logits.stride(0), first_rows, drafts, positions, temperature, best, found, *sums,
        out["tokens"], out["counts"], out["logprobs"], out["processed"], pieces,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def thresholds(
    logits: torch.Tensor,
    owners: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    lowest: torch.Tensor,
) -> None:
    """Write the threshold of each row to `lowest` [R]: -inf for a row that is greedy, unmasked or not valid."""
    rows, width = logits.shape
    chosen: Tuning = tuning(logits.device)
    blocks, pieces = pieces_of(rows, width, chosen.search_block, chosen.search_programs, logits.device)
    options: dict[str, Any] = {"num_warps": chosen.search_warps, "enable_fp_fusion": False}
    options["BLOCK"] = chosen.search_block
    peak = torch.empty(rows, MOST_PIECES, dtype=torch.float32, device=logits.device)
    row = (logits, logits.stride(0), width)
    search.peaks[(rows, pieces)](*row, peak, lowest, blocks, **options)
    keys = torch.empty(rows, search.CAPACITY, dtype=torch.int32, device=logits.device)
    state = torch.zeros(2, rows, search.STATE, dtype=torch.int64, device=logits.device)
    # Top-p is of what top-k keeps.
    for limits, own, mass in ((top_k, state[0], False), (top_p, state[1], True)):
        if limits is None:
            continue
        shared = (*row, owners, temperature, limits.contiguous(), peak, lowest, own)
        for level in (0, 1):
            search.bucket_sums[(rows, pieces)](*shared, blocks, pieces, MASS=mass, LEVEL=level, **options)
        search.collect[(rows, pieces)](*shared, keys, blocks, pieces, MASS=mass, **options)
        search.select[(rows,)](*shared, keys, pieces, MASS=mass, **options)


def pieces_of(rows: int, width: int, block: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Return the blocks of a piece, and the pieces of a row, for so many programs a multiprocessor."""
    blocks = triton.cdiv(width, block)
    wanted = max(1, min(MOST_PIECES, blocks, programs * multiprocessors(device) // rows))
    each = triton.cdiv(blocks, wanted)
    return each, triton.cdiv(blocks, each)


@cache
def _word_table(device: torch.device) -> torch.Tensor:
    """bounds.WORD_THRESHOLDS on a device."""
    return torch.from_numpy(WORD_THRESHOLDS.astype(np.int64)).to(device)
