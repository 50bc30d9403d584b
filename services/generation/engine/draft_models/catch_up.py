"""Divide a budget of tokens among samples that a draft model with its own KV has fallen behind. Pure."""

from __future__ import annotations

import numpy as np

from services.generation.engine.sampling.rows import IntArray


def allot(missing: IntArray, budget: int) -> IntArray:
    """Return how many missing tokens of each sample are computed before this step, [n].

    Those that miss least come first, so that samples that are drafted for already are not held up by others; the
    last one that anything is left for gets a part. That bounds what a step waits for when a whole batch enters
    speculation at once (ReSpec, section 5.2): samples that have caught up draft, the others in later steps.

    Args:
        missing: tokens of each sample, [n], not negative.
        budget: most tokens in all.
    """
    order = np.argsort(missing, kind="stable")
    before = np.cumsum(missing[order]) - missing[order]
    allotted = np.zeros_like(missing)
    allotted[order] = np.clip(budget - before, 0, missing[order])
    return allotted
