"""Proposals of a step whose drafts and positions only the device knows: as `sampling.proposed`, for V2."""

from __future__ import annotations

import numpy as np
import torch

from kernels.coupled_sampler.noise import Purpose
from kernels.coupled_sampler.proposals import NO_PROPOSAL, RowProposals, log_odds
from kernels.coupled_sampler.uniforms import uniforms
from services.generation.engine.sampling.rows import IntArray
from services.generation.engine.types import Verifier
from services.generation.engine.v2.device_rows import DeviceRows
from services.generation.engine.v2.rollout_table import RolloutFollowers, RolloutTable
from services.generation.engine.v2.settings import BatchSettings


def proposals_of_rows(
    rows: DeviceRows, batch: BatchSettings, followers: RolloutFollowers | None, table: RolloutTable
) -> RowProposals | None:
    """Return what the rows of a step propose, and how probable it must be; None if nothing is proposed.

    Args:
        rows: the layout.
        batch: settings of the samples.
        followers: samples that may follow a cached rollout of the table.
        table: of them.
    """
    n, samples = len(batch.samples), rows.samples
    rejecting = np.fromiter((each.verifier is Verifier.REJECTION for each in batch.samples), bool, n)
    if followers is None and not rejecting.any():
        return None
    raw = np.zeros(len(samples), bool)
    proposed = _Proposed(rows, batch.seeds.numpy())
    last = np.isin(np.arange(len(samples)), rows.cu[1:] - 1)
    if len(verified := np.flatnonzero(rejecting[samples] & ~last)):
        proposed.reject(verified)
    if followers is not None:
        own = np.zeros(n, bool)
        own[followers.places] = [
            not batch.samples[place].processed_logprobs for place in followers.places.tolist()
        ]
        raw = own[samples]
        proposed.follow(followers, table)
    odds = log_odds(proposed.theta)
    return RowProposals(proposed.tokens, odds, torch.from_numpy(raw), torch.from_numpy(rejecting))


class _Proposed:
    """Proposed tokens of all rows, [R] int64, and what their probabilities must exceed, [R] float64."""

    def __init__(self, rows: DeviceRows, seeds: IntArray) -> None:
        self._rows, self._seeds, count = rows, seeds, len(rows.samples)
        self.tokens = torch.full((count,), NO_PROPOSAL, dtype=torch.int64, device=rows.device)
        self.theta = torch.full((count,), torch.nan, dtype=torch.float64, device=rows.device)

    def reject(self, index: IntArray) -> None:
        """Propose the drafts behind some rows."""
        there = self._rows.put_all(rows=index, seeds=self._seeds[self._rows.samples[index]])
        place = there["rows"]
        self.tokens[place] = self._rows.inputs[place + 1].long()
        positions = self._rows.row_positions(place)
        self.theta[place] = uniforms(there["seeds"], positions, Purpose.REJECTION)

    def follow(self, followers: RolloutFollowers, table: RolloutTable) -> None:
        """Propose the next tokens of rollouts, as far as the drafts before a row are the rollout's, too."""
        rows = self._rows
        of_table = np.full(len(rows.cu) - 1, -1)
        of_table[followers.places] = followers.rows
        index = np.flatnonzero(of_table[rows.samples] >= 0)
        samples, offsets = rows.samples[index], rows.offsets[index]
        there = rows.put_all(
            rows=index,
            table=of_table[samples],
            offsets=offsets,
            first=np.arange(len(index)) - offsets,
            seeds=self._seeds[samples],
        )
        place, own = there["rows"], there["table"]
        positions = rows.row_positions(place)
        most = table.tokens.shape[1] - 1
        wanted = table.tokens[own, positions.clamp(max=most)].long()
        before = table.tokens[own, (positions - 1).clamp(0, most)]
        # A row is the target's distribution after the drafts before it: no use once those are not the rollout.
        differs = ((there["offsets"] > 0) & (rows.inputs[place] != before)).long().cumsum(0)
        agrees = differs == differs[there["first"]]
        follows = agrees & table.live[own] & (positions < table.lengths[own])
        self.tokens[place] = torch.where(follows, wanted, NO_PROPOSAL)
        drawn = uniforms(there["seeds"], positions, Purpose.LENIENT)
        self.theta[place] = drawn * table.scales[own, positions.clamp(max=most)]
