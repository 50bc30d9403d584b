"""Loss of training: the head's divergence from the policy, and the drafts of it that would be rejected.

    sum over draft positions k and rows of  w(sample) * decay^k * ((1 - a) * mass * KL(p || q) + a * P(rejected))

p is the policy's distribution renormalised over the draft vocabulary, and `mass` its probability of that
vocabulary: the gradient is that of KL(p_all || q) over the tokens that the head can draft. P(rejected) is the
probability that the head, drawing with the noise that gave the sample its token, draws another one
(evaluation.py, `agreement`): what drafting is about. A small head cannot have the whole distribution; divergence
makes it spend itself on unlikely tokens, of which few are ever drawn. Divergence is needed all the same, as a head
that is far off is rejected whichever way it moves a little. `a` is `acceptance_share`. Logits are computed
in chunks of bounded size, and recomputed for the backward pass if there is more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.kd_loss import kd_loss
from services.drafter.learning.batches import Pass
from services.drafter.learning.head import Eagle3Head
from services.drafter.learning.settings import LearningSettings, Targets
from services.drafter.learning.target import TargetModel


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """Sums over one pass.

    `total` is the weighted loss with its gradient, `weight` its divisor; `divergence` and `mass` [depth] are
    mass * KL and mass of each draft position, unweighted and without gradient.
    """

    total: Tensor
    weight: Tensor
    divergence: Tensor
    mass: Tensor


def distill(
    head: Eagle3Head,
    outputs: Sequence[Tensor],
    policy: TargetModel,
    policy_output: Tensor,
    rows: Pass,
    weights: Tensor,
    settings: LearningSettings,
) -> DistillationLoss:
    """Return the loss of one pass.

    Args:
        outputs: those of `Unroll`, one for each draft position.
        policy_output: last outputs of the policy, [B, L, h].
        weights: w(r) of the samples of the pass, [B] float32.
    """
    inputs = head, policy, settings
    total = torch.zeros((), device=weights.device)
    weight = torch.zeros((), device=weights.device)
    divergence, masses = torch.zeros(2, settings.depth, device=weights.device)
    piece = max(settings.chunk_entries // policy.vocabulary, 1)
    for place, output in enumerate(outputs):
        about = rows.drafted_at(place)
        decay = settings.place_decay**place
        for part in about.split(piece):
            mine = output[rows.chain(part, place)]
            theirs = policy_output[rows.rollout[part], rows.behind[part]]
            if len(about) > piece:
                found = checkpoint(_losses, *inputs, mine, theirs, rows.token[part], use_reentrant=False)
            else:
                found = _losses(*inputs, mine, theirs, rows.token[part])
            loss, apart, mass = found
            share = weights[rows.rollout[part]] * decay
            total = total + (share * loss).sum()
            weight += share.sum()
            divergence[place] += apart.sum()
            masses[place] += mass.sum()
    return DistillationLoss(total, weight, divergence, masses)


def _targets(
    policy: TargetModel, tokens: Tensor | None, settings: LearningSettings, output: Tensor
) -> tuple[Tensor, Tensor]:
    """Return logits over the draft vocabulary [n, d], and its mass [n], from last outputs [n, h] of the policy.

    `tokens` are those of the head's rows (None: all).
    """
    logits = policy.logits(output).float()
    if settings.targets is Targets.TOP_K:
        logits = keep_top(logits, settings.top_k)
    if tokens is None:
        return logits, torch.ones(len(logits), device=logits.device)
    inside = logits[:, tokens]
    mass = (inside.logsumexp(-1) - logits.logsumexp(-1)).exp()
    # A row without any token that the head can draft has mass 0 and teaches nothing.
    return torch.where(mass.unsqueeze(1) > 0, inside, 0.0), mass


def keep_top(logits: Tensor, k: int) -> Tensor:
    """Keep the k highest logits of each row [n, V] and set the others to -inf."""
    if k >= logits.shape[-1]:
        return logits
    lowest = logits.topk(k, -1).values[:, -1:]
    return torch.where(logits < lowest, -torch.inf, logits)


def _losses(
    head: Eagle3Head,
    policy: TargetModel,
    settings: LearningSettings,
    output: Tensor,
    policy_output: Tensor,
    token: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of rows whose sampled tokens are given, mass * KL without gradient, and mass, [n] each."""
    with torch.no_grad():
        theirs, mass = _targets(policy, head.tokens, settings, policy_output)
    mine = head.logits(output).float()
    divergence = kd_loss(mine, theirs.contiguous(), mass)
    share = settings.acceptance_share
    if not share:
        return divergence, divergence.detach(), mass
    loss = (1 - share) * divergence + share * rejection(theirs, mine, mass, _row_of(token, head.tokens))
    return loss, divergence.detach(), mass


def rejection(theirs: Tensor, mine: Tensor, mass: Tensor, row: Tensor) -> Tensor:
    """Return the probability that the head drafts another token than the sampled one, [n].

    Args:
        theirs: the policy's logits over the draft vocabulary, [n, d].
        mine: the head's, [n, d]; they get the gradient.
        mass: the policy's probability of the draft vocabulary, [n].
        row: index of the sampled token in the draft vocabulary, [n]; -1 where the head cannot draft it, which
            teaches nothing.
    """
    log_p, log_q = theirs.log_softmax(-1), mine.log_softmax(-1)
    at = row.clamp(min=0).unsqueeze(1)
    ratio = log_p.gather(1, at) - log_q.gather(1, at)
    # Of targets that leave the sampled token out nothing can be learned about it either.
    taught = (row >= 0) & ratio.squeeze(1).isfinite()
    ratio = torch.where(taught.unsqueeze(1), ratio, 0.0)
    inside = mass.log() + torch.maximum(log_p, log_q + ratio).logsumexp(-1)
    outside = (1 - mass).clamp(min=0).log()
    return torch.where(taught, 1 - (-torch.logaddexp(outside, inside)).exp(), 1.0)


def _row_of(token: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the rows of the head's output for tokens, [n]; -1 where it has none. `tokens` rise (None: all)."""
    if tokens is None:
        return token
    place = torch.searchsorted(tokens, token).clamp(max=len(tokens) - 1)
    return torch.where(tokens[place] == token, place, -1)
