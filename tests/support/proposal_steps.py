"""Random steps with everything a row can ask for: drafts, proposals, residual sampling, edits and masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.coupled_sampler.proposals import RowProposals, log_odds
from kernels.coupled_sampler.sample import Edited, Sampled, sample


def random_step(seed: int, width: int, requests: int, *, plain: bool = False) -> dict[str, Any]:
    """Return the arguments of `sample` for a few requests; proposals are mostly likely tokens, drafts mostly true.

    `plain`: without proposals, edits and masks.
    """
    rng = np.random.default_rng(seed)
    each = rng.integers(1, 5, requests)
    cu = np.concatenate(([0], np.cumsum(each)))
    rows = int(cu[-1])
    owner = np.repeat(np.arange(requests), each)
    logits = rng.normal(0, rng.choice([0.3, 2.0, 6.0], (rows, 1)), (rows, width)).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    logits[rng.random((rows, width)) < rng.choice([0.0, 0.6])] = -np.inf
    if rng.random() < 0.2:
        logits[rng.integers(rows), rng.integers(width)] = rng.choice([np.nan, np.inf])
    likely = np.nan_to_num(logits, nan=-np.inf).argmax(axis=1)
    tokens = np.where(rng.random(rows) < 0.7, likely, rng.integers(0, width, rows))
    drafts = np.delete(tokens, cu[1:] - 1)
    arguments: dict[str, Any] = {
        "logits": torch.from_numpy(logits).to(rng.choice([torch.float32, torch.bfloat16])),
        "seeds": torch.from_numpy(rng.integers(0, 2**64, requests, dtype=np.uint64).view(np.int64)),
        "positions": torch.from_numpy(rng.integers(0, 1000, requests)),
        "temperature": torch.from_numpy(rng.choice([0, 0.5, 1, 1, 1.7], requests).astype(np.float32)),
        "drafts": torch.from_numpy(drafts),
        "cu_rows": torch.from_numpy(cu),
    }
    if plain:
        return arguments
    if rng.random() < 0.6:
        arguments["min_p"] = torch.from_numpy(rng.choice([0, 0.05, 0.6], requests).astype(np.float32))
    if rng.random() < 0.6:
        arguments["top_p"] = torch.from_numpy(rng.choice([0.4, 0.9, 1], requests).astype(np.float32))
    if rng.random() < 0.4:
        arguments["top_k"] = torch.from_numpy(rng.choice([0, 3, width // 2], requests))
    if rng.random() < 0.6:
        index = np.flatnonzero(rng.random(rows) < 0.5)
        changed = logits[index] + rng.normal(0, 1, (len(index), width)).astype(np.float32)
        changed[rng.random(changed.shape) < 0.3] = -np.inf
        arguments["edited"] = Edited(torch.from_numpy(index), torch.from_numpy(changed.astype(np.float32)))
    residual = rng.random(requests) < 0.4
    proposed = np.where(rng.random(rows) < 0.85, tokens, -1)
    theta = rng.choice([rng.random(rows), rng.random(rows) * 1e-3, np.full(rows, 2.0), np.zeros(rows)])
    odds = log_odds(torch.from_numpy(np.where(rng.random(rows) < 0.05, np.nan, theta)))
    # A request that is verified by rejection proposes its drafts, and nothing in its last row.
    last = np.zeros(rows, bool)
    last[cu[1:] - 1] = True
    proposed = np.where(residual[owner], np.where(last, -1, tokens), proposed)
    arguments["proposals"] = RowProposals(
        torch.from_numpy(proposed),
        odds,
        torch.from_numpy(~residual[owner] & (rng.random(rows) < 0.6)),
        torch.from_numpy(residual),
    )
    return arguments


def sampled(arguments: dict[str, Any], device: torch.device, backend: str) -> Sampled:
    """Return the result of a step on a device."""
    there = dict(arguments)
    there["logits"] = arguments["logits"].to(device)
    if "edited" in arguments:
        edited = arguments["edited"]
        there["edited"] = Edited(edited.rows, edited.logits.to(device))
    return sample(**there, backend=backend).to_host()
