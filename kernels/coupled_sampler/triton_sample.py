"""Launches the sampler's kernels: thresholds where there are masks, the scan, and the finish."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from kernels.coupled_sampler import triton_threshold as search
from kernels.coupled_sampler.bounds import WORD_THRESHOLDS
from kernels.coupled_sampler.noise import Domain
from kernels.coupled_sampler.triton_finish import MOST_PIECES, finish
from kernels.coupled_sampler.triton_scan import scan
from kernels.tuning import Tuning, multiprocessors, tuning

MASKS = frozenset({"top_k", "top_p", "floors"})


class LogitPart(NamedTuple):
    """Rows of a step that lie in one tensor: their numbers in the step, and their rows in the tensor, int64."""

    logits: torch.Tensor
    places: torch.Tensor
    sources: torch.Tensor


def sample_triton(
    logits: torch.Tensor,
    vectors: dict[str, torch.Tensor],
    parts: Sequence[LogitPart],
    out: dict[str, torch.Tensor],
    domain: Domain,
) -> torch.Tensor | None:
    """Write `out`, as sample.Sampled has it; arguments checked by its `sample`, all on the device of the logits.

    `vectors`: seeds, positions, temperature, drafts, first_rows [N + 1], owners [R]; where there are masks top_k,
    top_p and floors [N]; where there are proposals proposed, log_odds and flags [R]; each contiguous. The parts
    have every row once; those whose tensor is another one than `logits` are edited. Returns the rows' thresholds
    [R], if there are masks.
    """
    rows, width = logits.shape
    if rows == 0:
        return None
    chosen, device = tuning(logits.device), logits.device
    owners, temperature, first_rows = vectors["owners"], vectors["temperature"], vectors["first_rows"]
    masked, proposing = not MASKS.isdisjoint(vectors), "proposed" in vectors
    lowest = torch.full((rows,), -torch.inf, device=device)
    if masked:
        thresholds(parts, vectors, lowest)
    proposed, odds, flags = (vectors.get(name, owners) for name in ("proposed", "log_odds", "flags"))
    blocks, pieces = pieces_of(rows, width, chosen.scan_block, chosen.scan_programs, device)
    # Rows are as far apart as they can be, not as there are pieces: a kernel is compiled for every alignment.
    best, values, *sums = torch.empty(6, rows, MOST_PIECES, dtype=torch.float32, device=device)
    found = torch.empty(rows, MOST_PIECES, dtype=torch.int32, device=device)
    against = torch.empty(rows if proposing else 1, MOST_PIECES, dtype=torch.int64, device=device)
    own = torch.empty(rows, dtype=torch.float32, device=device)
    for part in parts:
        edited = part.logits is not logits
        scan[(len(part.places), pieces)](
            part.logits, part.logits.stride(0), logits, logits.stride(0), width, part.places, part.sources, owners,
            vectors["seeds"], vectors["positions"], temperature, first_rows, lowest, _word_table(device),
            int(domain), proposed, odds, flags, best, found, values, *sums, against, own, blocks, MOST_PIECES,
            EDITED=edited, MASKED=masked or edited or proposing, PROPOSED=proposing, BLOCK=chosen.scan_block,
            STAGES=chosen.scan_stages, WIDE=chosen.wide_products, num_warps=chosen.scan_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    finish[(len(first_rows) - 1,)](
        logits, logits.stride(0), first_rows, vectors["drafts"], vectors["positions"], temperature, proposed,
        best, found, values, *sums, against, own,
        out["tokens"], out["counts"], out["reused"], out["logprobs"], out["processed"], pieces,
        PROPOSED=proposing, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return lowest if masked else None


def thresholds(parts: Sequence[LogitPart], vectors: dict[str, torch.Tensor], lowest: torch.Tensor) -> None:
    """Write the threshold of each row to `lowest` [R]: -inf for a row that is greedy, unmasked or not valid.

    `vectors`: owners [R] and temperature [N], and of top_k, top_p and floors [N] those that there are.
    """
    device, rows = lowest.device, len(lowest)
    chosen: Tuning = tuning(device)
    width = parts[0].logits.shape[1]
    blocks, pieces = pieces_of(rows, width, chosen.search_block, chosen.search_programs, device)
    options: dict[str, Any] = {"num_warps": chosen.search_warps, "enable_fp_fusion": False}
    options["BLOCK"] = chosen.search_block
    peak = torch.empty(rows, MOST_PIECES, dtype=torch.float32, device=device)
    keys = torch.empty(rows, search.CAPACITY, dtype=torch.int32, device=device)
    state = torch.zeros(2, rows, search.STATE, dtype=torch.int64, device=device)
    owned = (vectors["owners"], vectors["temperature"])
    for part in parts:
        row = (part.logits, part.logits.stride(0), width, part.places, part.sources)
        grid = (len(part.places), pieces)
        search.peaks[grid](*row, peak, lowest, blocks, **options)
        if "floors" in vectors:
            search.raise_floors[grid[:1]](
                width, part.places, *owned, vectors["floors"], peak, lowest, pieces, enable_fp_fusion=False
            )
        # Top-p is of what top-k keeps.
        for name, own, mass in (("top_k", state[0], False), ("top_p", state[1], True)):
            if name not in vectors:
                continue
            shared = (*row, *owned, vectors[name], peak, lowest, own)
            for level in (0, 1):
                search.bucket_sums[grid](*shared, blocks, pieces, MASS=mass, LEVEL=level, **options)
            search.collect[grid](*shared, keys, blocks, pieces, MASS=mass, **options)
            search.select[grid[:1]](*shared, keys, pieces, MASS=mass, **options)


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
