"""Sample tokens from logits: penalties and masks, then the coupled arg-max with verification.

One row of logits is one position of one sample. A sample with k draft tokens has k + 1 rows, in order: row j was
computed with the first j draft tokens in place, so it is the target's distribution after them. Plain decoding is
the case k = 0 for every sample. There is no other code path, so speculation on and off agree token for token
(docs/exactness.md).

A sample may ask for rejection instead: standard speculative sampling, for parity with the papers and as a
baseline. Drafts come without probabilities: each is a certainty of its drafter (q is 1 at the draft d). So it is
accepted with probability p(d), p the target's distribution. At the first rejection the token is drawn from p
without d, renormalised; after the last draft from p. Every token is a sample of the target whatever the drafts,
but *which* token depends on them. All randomness is keyed by (seed, position), so a run repeats. It is kept apart
from the noise of coupled sampling (`Domain.TOKEN`), with which drafts may have been made: a residual drawn with
the noise that chose the rejected draft would not be a sample of the residual.

A sample may also take over tokens of a cached rollout, by SPEC-RL's rule. The token y is taken over iff p_now(y)
> u * p_then(y) / lenience, with p_now the current policy's probability of it, p_then the probability under the
policy which generated it, and u a uniform that is a pure function of (seed, position). So the result does not
depend on how many positions a step looks at. p_now and p_then are of the model's own distribution, or of the one
sampled from where a sample asks for such log-probabilities. Beyond the rule:

- a token that may not be sampled now (top-k, top-p, min-p, min-tokens) is not taken over;
- at temperature 0 a token is taken over iff it is the arg-max;
- nor is a token whose p_then is not a probability above 0, nor any in a row with NaN or +inf logits.

The first token that is not taken over is replaced by the coupled sample of the same row. Its noise is of another
domain than u, so it is a sample of the current policy whatever u was.
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
from services.generation.engine.sampling.inputs import CachedRollout, DraftsOfRow, DrawSettings, SampleNoise
from services.generation.engine.sampling.outputs import likeliest, with_runners_up
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.types import Verifier

FloatArray = npt.NDArray[np.float64]


class Candidates(NamedTuple):
    """The cached tokens that a step decides on, C of all samples: `row` of each, and its `token`.

    `bound` [C] is what the current policy's probability of it must exceed; NaN: it is not taken over.
    """

    row: IntArray
    token: IntArray
    bound: FloatArray


def candidates(rows: Rows, followed: Mapping[int, CachedRollout], seeds: torch.Tensor) -> Candidates:
    """Find the rows that the cached rollouts reach. A sample's candidates lie in its first rows.

    Args:
        rows: the layout of the step.
        followed: by its index, rising, the cached rollout of each sample that has taken over all its tokens so far.
        seeds: of the samples, [n] int64.
    """
    row, token, scales = [], [], []
    for i, rollout in followed.items():
        begin, drafts = int(rows.positions[i]), rows.drafts_of(i)
        wanted = rollout.tokens[begin : begin + len(drafts) + 1]
        # A row is the target's distribution after the drafts before it: no use once those are not the rollout.
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


def draw(
    logits: torch.Tensor,
    rows: Rows,
    settings: DrawSettings,
    noise: list[SampleNoise],
    edited: Edited | None,
    proposals: RowProposals | None,
) -> Sampled:
    """Sample and verify all rows: one copy to the device, which is not waited for, and one from it, which is.

    Args:
        logits: [R, V], any float type.
        rows: the layout.
        settings: temperature and masks of the samples.
        noise: one per sample.
        edited: what some rows are sampled from instead.
        proposals: tokens to accept by their probability.

    Returns:
        The result in host memory, but for the thresholds.
    """
    n = len(noise)
    seeds = np.fromiter((item.seed for item in noise), np.uint64, n).view(np.int64)
    min_p = np.fromiter((item.min_p for item in noise), np.float32, n)
    return sample_rows(
        logits,
        torch.from_numpy(seeds),
        torch.from_numpy(rows.positions),
        torch.from_numpy(settings.temperature),
        torch.from_numpy(rows.drafts),
        torch.from_numpy(rows.cu),
        top_k=None if settings.top_k is None else torch.from_numpy(settings.top_k),
        top_p=None if settings.top_p is None else torch.from_numpy(settings.top_p),
        min_p=torch.from_numpy(min_p) if min_p.any() else None,
        edited=edited,
        proposals=proposals,
    ).to_host()


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens of a step: sample i emits `counts[i]` tokens, `tokens[cu[i] : cu[i] + counts[i]]`.

    Where the step has draft trees, `rows` are those that the samples emit, one after another.
    `logprobs` [R] is filled for emitted rows. NaN marks a row from which nothing could be sampled. The first
    `reused[i]` tokens are taken over from a cached rollout. `top_tokens` and `top_logprobs` [R, K] have the
    likeliest tokens of emitted rows, as many as the sample asks for, then NO_TOKEN; or, of a sample that asks for
    near-ties, the runner-up and its margin.
    """

    tokens: IntArray
    counts: IntArray
    reused: IntArray
    logprobs: npt.NDArray[np.float32]
    top_tokens: IntArray
    top_logprobs: npt.NDArray[np.float32]
    rows: IntArray | None = None

    def sources(self, rows: Rows, width: int) -> IntArray:
        """Return the rows that each sample emits, [n, width]; behind its last one there is any row."""
        if self.rows is None:
            found: IntArray = np.minimum(rows.cu[:-1, None] + np.arange(width), rows.cu[-1] - 1)
            return found
        first = np.cumsum(self.counts) - self.counts
        return self.rows[np.minimum(first[:, None] + np.arange(width), len(self.rows) - 1)]


def sample(
    logits: torch.Tensor,
    rows: Rows,
    settings: DrawSettings,
    noise: list[SampleNoise],
    followed: Mapping[int, CachedRollout],
    masks: RowMasks | None = None,
    histories: Histories | None = None,
    recorded: Mapping[int, DraftsOfRow] | None = None,
) -> Verified:
    """Verify the drafts and sample the next token of every sample.

    Args:
        logits: [R, V], any float type; left as it is.
        rows: the layout.
        settings: temperature and masks of the samples.
        noise: one per sample.
        followed: by its index, the cached rollout of each sample that has taken over all its tokens so far.
        masks: of the rows of samples that follow a grammar.
        histories: of the samples; may be None if none has penalties.
        recorded: by its index, what a sample's drafts are verified by beside their probability now.
    """
    edited = edit(logits, rows, noise, masks, histories)
    proposals = proposals_of(rows, noise, followed, recorded)
    drawn = draw(logits, rows, settings, noise, edited, proposals)
    tokens, counts = drawn.tokens.numpy(), drawn.counts.numpy()
    by_processed = np.fromiter((item.processed_logprobs for item in noise), bool, len(noise))
    logprobs = np.where(by_processed[rows.samples], drawn.processed.numpy(), drawn.logprobs.numpy())
    reused = np.zeros(len(noise), np.int64)
    index = list(followed)
    reused[index] = drawn.reused.numpy()[index]
    top = likeliest(logits, rows, counts, noise, settings, edited, drawn.lowest)
    told = with_runners_up(top, logits, rows, (tokens, counts), noise, settings, edited, drawn.lowest)
    return Verified(tokens, counts, reused, logprobs, *told)
