"""Sample tokens from logits: penalties and masks, then the coupled arg-max with verification.

One row of logits is one position of one sample. A sample with k draft tokens has k + 1 rows, in order: row j was
computed with the first j draft tokens in place, so it is the target's distribution after them. Plain decoding is
the case k = 0 for every sample. There is no other code path, so responses with and without speculation agree token
for token (docs/exactness.md).

A sample may request rejection sampling instead, or reuse tokens of a cached rollout: see `proposals_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.coupled_sampler.noise import Purpose
from kernels.coupled_sampler.proposals import NO_PROPOSAL, RowProposals, log_odds, uniforms
from kernels.coupled_sampler.sample import Edited, Sampled
from kernels.coupled_sampler.sample import sample as sample_rows
from services.generation.engine.sampling.constraints import Histories, RowMasks, edit
from services.generation.engine.sampling.inputs import BatchSettings, CachedRollout, DraftsOfRow
from services.generation.engine.sampling.outputs import likeliest, with_runners_up
from services.generation.engine.sampling.rows import IntArray, Rows


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens of a step: sample i emits `counts[i]` tokens, `tokens[cu[i] : cu[i] + counts[i]]`.

    If drafts of the step are no chains, `rows` are the rows that the samples emit, one sample after another.
    `logprobs` [R] has values for emitted rows. NaN marks a row from which nothing could be sampled. The first
    `reused[i]` tokens come from a cached rollout. `top_tokens` and `top_logprobs` [R, K] have the likeliest tokens
    of emitted rows, as many as the sample requests, then NO_TOKEN; for a sample that requests near-ties, the
    runner-up and its margin.
    """

    tokens: IntArray
    counts: IntArray
    reused: IntArray
    logprobs: npt.NDArray[np.float32]
    top_tokens: IntArray
    top_logprobs: npt.NDArray[np.float32]
    rows: IntArray | None = None

    def sources(self, rows: Rows, width: int) -> IntArray:
        """Return the rows that each sample emits, [n, width]; after its last one, any row."""
        if self.rows is None:
            found: IntArray = np.minimum(rows.cu[:-1, None] + np.arange(width), rows.cu[-1] - 1)
            return found
        first = np.cumsum(self.counts) - self.counts
        return self.rows[np.minimum(first[:, None] + np.arange(width), len(self.rows) - 1)]


def sample(
    logits: torch.Tensor,
    rows: Rows,
    batch: BatchSettings,
    followed: Mapping[int, CachedRollout],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> Verified:
    """Verify the drafts and sample the next token of every sample.

    Args:
        logits: logits [R, V], any float type; not changed.
        rows: layout of the step.
        batch: settings of the samples.
        followed: cached rollouts of the samples that have reused all of its tokens so far, by index.
        masks: masks of the rows of samples that follow a grammar.
        histories: token counts of the samples; may be None if none has penalties.
        recorded: records by which drafts are verified in addition to their probability now, by index.
    """
    edited = None
    if batch.edited or masks is not None:
        edited = edit(logits, rows, batch.samples, masks, histories)
    proposals = proposals_of(rows, batch, followed, recorded)
    drawn = draw(logits, rows, batch, edited, proposals)
    tokens, counts = drawn.tokens.numpy(), drawn.counts.numpy()
    by_processed = batch.processed_logprobs[rows.samples]
    logprobs = np.where(by_processed, drawn.processed.numpy(), drawn.logprobs.numpy())
    reused = np.zeros(len(batch.samples), np.int64)
    index = list(followed)
    reused[index] = drawn.reused.numpy()[index]
    top = likeliest(logits, rows, counts, batch, edited, drawn.lowest)
    top = with_runners_up(top, logits, rows, (tokens, counts), batch, edited, drawn.lowest)
    return Verified(tokens, counts, reused, logprobs, *top)


def draw(
    logits: torch.Tensor,
    rows: Rows,
    batch: BatchSettings,
    edited: Edited | None,
    proposals: RowProposals | None,
) -> Sampled:
    """Sample and verify all rows with one copy to the device, which is not waited for, and one copy back, which is.

    Args:
        logits: logits [R, V], any float type.
        rows: layout of the step.
        batch: settings of the samples.
        edited: logits from which some rows are sampled instead.
        proposals: tokens to accept by their probability.

    Returns:
        The result in host memory, except for the thresholds.
    """
    masks = {"top_k": batch.top_k, "top_p": batch.top_p, "min_p": batch.min_p}
    return sample_rows(
        logits,
        torch.from_numpy(batch.seeds),
        torch.from_numpy(rows.positions),
        torch.from_numpy(batch.temperature),
        torch.from_numpy(rows.drafts),
        torch.from_numpy(rows.cu),
        edited=edited,
        proposals=proposals,
        **{name: torch.from_numpy(each) for name, each in masks.items() if each is not None},
    ).to_host()


def proposals_of(
    rows: Rows,
    batch: BatchSettings,
    followed: Mapping[int, CachedRollout],
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> RowProposals | None:
    """Return the tokens that rows propose, and the least probability of each; None if nothing is proposed.

    REJECTION is standard speculative sampling, for parity with the papers and as a baseline. Drafts come without
    probabilities, so each is a certainty of its drafter (q is 1 at the draft d), and is accepted with probability
    p(d), where p is the target's distribution. At the first rejection the token is drawn from p without d,
    renormalised; after the last draft, from p. Every token is a sample of the target whatever the drafts are, but
    *which* token depends on them. All randomness is keyed by (seed, position), so a run is repeatable. It is
    separate from the noise of coupled sampling (`Domain.TOKEN`), with which drafts may have been made: a residual
    drawn with the noise that chose the rejected draft would not be a sample of the residual.

    LENIENT reuses tokens of a cached rollout: see `candidates`.

    Args:
        rows: layout of the step.
        batch: settings of the samples.
        followed: cached rollouts of the samples that have reused all of its tokens so far, by index.
        recorded: records by which the drafts of rejecting samples are verified, by index.
    """
    samples, rejecting = rows.samples, batch.rejecting
    if not followed and not rejecting.any():
        return None
    seeds = torch.from_numpy(batch.seeds)
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
    by_processed = batch.processed_logprobs
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


class Candidates(NamedTuple):
    """Cached tokens that a step decides on, C of all samples: `row` of each, and its `token`.

    `bound` [C] is what the current policy's probability of it must exceed; NaN means that it is not reused.
    """

    row: IntArray
    token: IntArray
    bound: npt.NDArray[np.float64]


def candidates(rows: Rows, followed: Mapping[int, CachedRollout], seeds: torch.Tensor) -> Candidates:
    """Find the rows that the cached rollouts reach. A sample's candidates are in its first rows.

    This is SPEC-RL's rule: the token y is reused iff p_now(y) > u * p_then(y) / lenience, where p_now is the
    current policy's probability of it, p_then the probability under the policy that generated it, and u a uniform
    that is a pure function of (seed, position). So the result does not depend on how many positions a step
    verifies. p_now and p_then are of the model's own distribution, or, if the sample requests such
    log-probabilities, of the distribution that is sampled from. Beyond the rule:

    - a token that may not be sampled now (top-k, top-p, min-p, min-tokens) is not reused;
    - at temperature 0 a token is reused iff it is the arg-max;
    - nor is a token reused whose p_then is not a probability above 0, nor any in a row with NaN or +inf logits.

    The first token that is not reused is replaced by the coupled sample of the same row. Its noise is of another
    domain than u, so it is a sample of the current policy whatever u was.

    Args:
        rows: layout of the step.
        followed: cached rollouts of the samples that have reused all of its tokens so far, by ascending index.
        seeds: seeds of the samples, [n] int64.
    """
    row, token, scales = [], [], []
    for i, rollout in followed.items():
        begin, drafts = int(rows.positions[i]), rows.drafts_of(i)
        wanted = rollout.tokens[begin : begin + len(drafts) + 1]
        # A row is the target's distribution after the drafts before it: useless once they differ from the rollout.
        agree = min(len(drafts), len(wanted))
        differs = np.flatnonzero(drafts[:agree] != wanted[:agree])
        matched = int(differs[0]) if len(differs) else agree
        count = min(matched + 1, len(wanted))
        row.append(rows.cu[i] + np.arange(count))
        token.append(wanted[:count])
        scales.append(rollout.scales(begin, begin + count))
    where = np.concatenate(row)
    positions = torch.from_numpy(rows.row_positions[where])
    u = uniforms(seeds[torch.from_numpy(rows.samples[where])], positions, Purpose.LENIENT).numpy()
    return Candidates(where, np.concatenate(token), u * np.concatenate(scales))
