"""Verify draft trees: each segment as a chain by the sampler, then the walk through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from services.generation.engine.sampling.constraints import RowMasks
from services.generation.engine.sampling.draw_settings import DrawSettings
from services.generation.engine.sampling.noise import CachedRollout, SampleNoise
from services.generation.engine.sampling.penalties import Histories
from services.generation.engine.sampling.recorded import DraftsOfRow
from services.generation.engine.sampling.sampler import Verified, sample
from services.generation.engine.sampling.segments import TreeSegments


def sample_trees(
    logits: torch.Tensor,
    segments: TreeSegments,
    settings: DrawSettings,
    noise: list[SampleNoise],
    followed: Mapping[int, CachedRollout],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> Verified:
    """Verify the drafts of a step with trees, and sample the next token of every sample.

    Arguments are those of `sampler.sample`, by sample. What goes by a sample's history is right for samples without
    branches only, of which the primary chain is all that they have.
    """
    owners, primary = segments.owners, segments.primary
    if histories is not None:
        slots, more = np.full(len(owners), -1), [histories.more[owner] for owner in owners.tolist()]
        slots[primary] = histories.slots
        histories = histories._replace(slots=slots, more=more)
    verified = sample(
        logits,
        segments.rows,
        DrawSettings(*(None if each is None else each[owners] for each in settings)),  # type: ignore[arg-type]
        [noise[owner] for owner in owners.tolist()],
        {int(primary[i]): rollout for i, rollout in followed.items()},
        masks,
        histories,
        None if recorded is None else {int(primary[i]): drafts for i, drafts in recorded.items()},
    )
    rows, counts = segments.emitted(verified.tokens, verified.counts)
    return replace(verified, counts=counts, reused=verified.reused[primary], rows=rows)
