"""How far the head's drafts of finished samples would have been accepted, under coupled noise.

Decoding is replayed over whole samples: a draft of `depth` tokens starts where decoding would have started one,
behind every token that a verification ended with (replay.py). A sample that names its seed is drafted for with its
own noise, as an instance does it: a place is right or not. For one without, each place is right with the
probability that the noise which gave the sample's token x from p gives the same token from q,

    P(argmax q = x | argmax p = x) = 1 / sum_v max(p_v, q_v p_x / q_x)

the chance of agreement of two Gumbel-max draws that share their noise: an expectation over all noise that explains
the sample. Both are exact if the policy is the one that sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.coupled_sampler.sample import sample
from services.drafter.learning.batches import Pass, make_pass, passes
from services.drafter.learning.head import Head
from services.drafter.learning.loss import distill
from services.drafter.learning.replay import nothing, replay
from services.drafter.learning.settings import LearningSettings, Targets
from services.drafter.learning.target import Policy
from services.drafter.learning.unroll import Unroll
from services.drafter.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one drafter on some rollouts."""

    acceptance_length: float
    """Tokens a verification, the target's own included: between 1 and depth + 1. 0 where there was nothing."""
    by_place: tuple[float, ...]
    """Share of each place of a draft that is accepted, if all before it were."""
    kd_loss: float
    """KL(policy || drafter) in nats, mean over all places of all drafts that could start anywhere."""
    samples: int
    tokens: int
    """Response tokens that drafts had a say in."""
    verifications: float
    accepted: float
    """Draft tokens that verification would have kept."""
    with_seed: int
    """Samples that were drafted for with their own noise; the rest is an expectation."""


@torch.no_grad()
def evaluate(
    head: Head, policy: Policy, rollouts: Sequence[Rollout], settings: LearningSettings
) -> Evaluation:
    """Measures `head` on rollouts that `policy` sampled, each of two response tokens or more."""
    unroll = Unroll(head, settings.chunk_entries)
    # Whatever it is taught, it is measured against all that the policy says.
    settings = replace(settings, targets=Targets.POLICY)
    found = nothing(settings.depth)
    divergence, mass = torch.zeros(2, device=policy.device)
    for places in passes(rollouts, settings.micro_tokens):
        batch = [rollouts[place] for place in places]
        rows = make_pass(batch, policy.device)
        seen = policy.read(rows.tokens, head.shape.layers)
        outputs = unroll(seen.features.float(), seen.embeddings.float(), settings.depth, rows.first)
        weights = torch.ones(len(batch), device=policy.device)
        loss = distill(head, outputs, policy, seen.output, rows, weights, settings)
        divergence, mass = divergence + loss.divergence.sum(), mass + loss.mass.sum()
        right = _right(head, outputs, policy, seen.output, rows, batch, settings)
        ends = np.cumsum([rollout.drafted for rollout in batch])[:-1]
        for columns in np.split(right, ends, axis=1):
            found = found + replay(columns)
    return Evaluation(
        found.acceptance_length,
        found.by_place,
        float(divergence / mass) if float(mass) else 0.0,
        len(rollouts),
        found.tokens,
        found.verifications,
        float(found.accepted.sum()),
        sum(rollout.seed is not None for rollout in rollouts),
    )


def _right(
    head: Head,
    outputs: Sequence[Tensor],
    policy: Policy,
    policy_output: Tensor,
    rows: Pass,
    rollouts: Sequence[Rollout],
    settings: LearningSettings,
) -> NDArray[np.float64]:
    """[depth, rows]: probability that place k of a draft is the row's token; 0 where no draft has that place."""
    found = torch.zeros(settings.depth, len(rows), dtype=torch.float64, device=policy.device)
    has_seed = torch.tensor([rollout.seed is not None for rollout in rollouts], device=policy.device)
    # The sampler reads int64 as unsigned.
    seeds = torch.from_numpy(
        np.array([rollout.seed or 0 for rollout in rollouts], dtype=np.uint64).astype(np.int64)
    ).to(policy.device)
    piece = max(settings.chunk_entries // policy.vocabulary, 1)
    for place, output in enumerate(outputs):
        for part in rows.drafted_at(place).split(piece):
            logits = _widen(head.logits(output[rows.chain(part, place)]).float(), head, policy.vocabulary)
            known = has_seed[rows.rollout[part]]
            drawn, expected = part[known], part[~known]
            if len(drawn):
                tokens = _draft(logits[known], seeds[rows.rollout[drawn]], rows.offset[drawn] + 1)
                found[place, drawn] = (tokens == rows.token[drawn]).double()
            if len(expected):
                target = policy.logits(policy_output[rows.rollout[expected], rows.behind[expected]])
                found[place, expected] = agreement(target, logits[~known], rows.token[expected])
    return found.cpu().numpy()


def _draft(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The tokens that the head drafts with given noise, [n]; `positions` count the sample's tokens before."""
    count = len(logits)
    none = torch.empty(0, dtype=torch.int64, device=logits.device)
    ones = torch.ones(count, device=logits.device)
    return sample(logits.contiguous(), seeds, positions, ones, none, torch.arange(count + 1)).tokens


def agreement(target: Tensor, drafter: Tensor, tokens: Tensor) -> Tensor:
    """P(the drafter draws the token | the target drew it), noise shared: logits [n, V] twice, tokens [n] -> [n]."""
    log_p, log_q = target.double().log_softmax(-1), drafter.double().log_softmax(-1)
    at = tokens.unsqueeze(1)
    ratio = log_p.gather(1, at) - log_q.gather(1, at)
    scaled = torch.where(log_q > -torch.inf, log_q + ratio, -torch.inf)
    # inf where the drafter cannot name the token: then it never draws it.
    return 1 / torch.maximum(log_p, scaled).exp().sum(-1)


def _widen(logits: Tensor, head: Head, vocabulary: int) -> Tensor:
    """Over the whole vocabulary, [n, V]; -inf where the head has no row."""
    if head.tokens is None:
        return logits
    wide = logits.new_full((len(logits), vocabulary), -torch.inf)
    wide[:, head.tokens] = logits
    return wide
