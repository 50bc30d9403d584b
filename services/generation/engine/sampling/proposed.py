"""Proposals of a step: drafts that are verified by rejection, and tokens of cached rollouts.

Rejection is standard speculative sampling, for parity with the papers and as a baseline. Drafts come without
probabilities: each is a certainty of its drafter (q is 1 at the draft d). So it is accepted with probability p(d),
p the target's distribution. At the first rejection the token is drawn from p without d, renormalised; after the
last draft from p. Every token is a sample of the target whatever the drafts, but *which* token depends on them.

All randomness is keyed by (seed, position), so a run repeats. It is kept apart from the noise of coupled sampling
(`Domain.TOKEN`), with which drafts may have been made: a residual drawn with the noise that chose the rejected
draft would not be a sample of the residual.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kernels.coupled_sampler.noise import Purpose
from kernels.coupled_sampler.proposals import NO_PROPOSAL, RowProposals, log_odds
from kernels.coupled_sampler.uniforms import uniforms
from services.generation.engine.sampling.lenient import candidates
from services.generation.engine.sampling.noise import CachedRollout, SampleNoise
from services.generation.engine.sampling.recorded import DraftsOfRow
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.types import Verifier


def proposals_of(
    rows: Rows,
    noise: list[SampleNoise],
    followed: Mapping[int, CachedRollout],
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> RowProposals | None:
    """Return what the rows of a step propose, and how probable it must be; None if nothing is proposed.

    Args:
        rows: the layout.
        noise: one per sample.
        followed: by its index, the cached rollout of each sample that has taken over all its tokens so far.
        recorded: by its index, what the drafts are verified by of each sample that rejects and has such a record.
    """
    rejecting = np.fromiter((item.verifier is Verifier.REJECTION for item in noise), bool, len(noise))
    if not followed and not rejecting.any():
        return None
    samples = rows.samples
    seeds = torch.from_numpy(np.fromiter((item.seed for item in noise), np.uint64, len(noise)).view(np.int64))
    tokens, raw = np.full(len(samples), NO_PROPOSAL, np.int64), np.zeros(len(samples), bool)
    theta = np.full(len(samples), np.nan)
    drafted = np.ones(len(samples), bool)
    drafted[rows.cu[1:] - 1] = False
    draft = np.full(len(samples), NO_PROPOSAL, np.int64)
    draft[drafted] = rows.drafts
    verified = np.flatnonzero(drafted & rejecting[samples])
    tokens[verified] = draft[verified]
    owners, positions = torch.from_numpy(samples[verified]), torch.from_numpy(rows.row_positions[verified])
    theta[verified] = uniforms(seeds[owners], positions, Purpose.REJECTION).numpy()
    by_processed = np.fromiter((item.processed_logprobs for item in noise), bool, len(noise))
    for i, known in (recorded or {}).items():
        places = np.arange(rows.cu[i], rows.cu[i + 1] - 1)
        bounds = known.bounds(rows.drafts_of(i), theta[places])
        there = places[~np.isnan(bounds)]
        theta[there], raw[there] = bounds[~np.isnan(bounds)], not by_processed[i]
    if followed:
        found = candidates(rows, followed, seeds)
        tokens[found.row], theta[found.row] = found.token, found.bound
        raw[found.row] = ~by_processed[samples[found.row]]
    odds = log_odds(torch.from_numpy(theta))
    return RowProposals(torch.from_numpy(tokens), odds, torch.from_numpy(raw), torch.from_numpy(rejecting))
