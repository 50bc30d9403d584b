"""SPEC-RL's rule: decide how many tokens of a cached rollout are reused.

The token y at a position of the cached rollout is taken over iff u < lenience * p_now(y) / p_then(y), with
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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.coupled_sampler.noise import Purpose
from services.generation.engine.sampling.noise import CachedRollout
from services.generation.engine.sampling.rejection import uniforms
from services.generation.engine.sampling.rows import IntArray, Rows

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The cached tokens that a step decides on, C of all samples: `row` of each, its `token`, `then`, `lenience`.

    A sample's lie in its first rows, `count` [n] of them; 0 for a sample that takes nothing over. `beyond` [n]
    is whether its next row, behind those, can be sampled when all of them are taken over.
    """

    row: IntArray
    token: IntArray
    then: FloatArray
    lenience: FloatArray
    count: IntArray
    beyond: npt.NDArray[np.bool_]


def candidates(rows: Rows, followed: Mapping[int, CachedRollout]) -> Candidates:
    """Find the rows that the cached rollouts reach.

    Args:
        rows: the layout of the step.
        followed: by its index, rising, the cached rollout of each sample that has taken over all its tokens so far.
    """
    n = len(rows.cu) - 1
    count, beyond = np.zeros(n, np.int64), np.ones(n, bool)
    row, token, then, lenience = [], [], [], []
    for i, rollout in followed.items():
        begin, drafts = int(rows.positions[i]), rows.drafts_of(i)
        wanted = rollout.tokens[begin : begin + len(drafts) + 1]
        # A row is the target's distribution after the drafts before it: no use once those are not the rollout.
        agree = min(len(drafts), len(wanted))
        differs = np.flatnonzero(drafts[:agree] != wanted[:agree])
        matched = int(differs[0]) if len(differs) else agree
        count[i] = min(matched + 1, len(wanted))
        beyond[i] = count[i] <= matched and count[i] <= len(drafts)
        row.append(rows.cu[i] + np.arange(count[i]))
        token.append(wanted[: count[i]])
        then.append(rollout.logprobs[begin : begin + count[i]])
        lenience.append(np.full(count[i], rollout.lenience))
    return Candidates(
        np.concatenate(row),
        np.concatenate(token),
        np.concatenate(then),
        np.concatenate(lenience),
        count,
        beyond,
    )


def taken_over(
    rows: Rows,
    found: Candidates,
    now: npt.NDArray[np.float32],
    allowed: npt.NDArray[np.bool_],
    best: IntArray,
    seeds: npt.NDArray[np.uint64],
    temperature: npt.NDArray[np.float32],
) -> IntArray:
    """Return how many cached tokens each sample reuses, [n].

    Args:
        rows: the layout of the step.
        found: the candidates, C of them.
        now: [C], log-probability of each candidate under the current policy.
        allowed: [C], whether it may be sampled now.
        best: [C], the arg-max of each candidate's row; looked at where the temperature is 0.
        seeds: [n], of the samples.
        temperature: [n], of the samples.
    """
    owner = rows.samples[found.row]
    u = uniforms(seeds[owner], rows.row_positions[found.row], Purpose.LENIENT)
    sound = np.isfinite(now) & np.isfinite(found.then) & allowed
    with np.errstate(invalid="ignore", over="ignore"):
        accepted = u < found.lenience * np.exp(now.astype(np.float64) - found.then)
    greedy = temperature[owner] == 0
    accepted[greedy] = found.token[greedy] == best[greedy]
    # The candidates of a sample lie next to each other: count up to its first that is rejected.
    rejected = np.append(np.flatnonzero(~(accepted & sound)), len(owner))
    begin = np.concatenate(([0], np.cumsum(found.count)[:-1]))
    first = rejected[np.searchsorted(rejected, begin)]
    return np.minimum(first - begin, found.count)
