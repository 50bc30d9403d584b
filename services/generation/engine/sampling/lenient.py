"""SPEC-RL's rule: propose the tokens of a cached rollout, with the probability that each must exceed.

The token y at a position of the cached rollout is taken over iff p_now(y) > u * p_then(y) / lenience, with
p_now the current policy's probability of it, p_then that of the policy which generated it, and u a uniform that
is a pure function of (seed, position). So what is taken over does not depend on how many positions a step looks
at. p_now and p_then are of the model's own distribution, or of the one sampled from where a sample asks for such
log-probabilities. Beyond the rule:

- a token that may not be sampled now (top-k, top-p, min-p, min-tokens) is not taken over;
- at temperature 0 there is nothing to be lenient about: a token is taken over iff it is the arg-max;
- nor is a token whose p_then is not a probability above 0, nor any in a row with NaN or +inf logits.

The first token that is not taken over is replaced by the coupled sample of the same row. Its noise is of another
domain than u, so it is a sample of the current policy whatever u was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.coupled_sampler.noise import Purpose
from kernels.coupled_sampler.uniforms import uniforms
from services.generation.engine.sampling.noise import CachedRollout
from services.generation.engine.sampling.rows import IntArray, Rows

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
