"""Distillation loss: divergence of the head from the policy at every position of every draft.

    sum over draft positions k and rows of  w(sample) * decay^k * mass * KL(p || q)

p is the policy's distribution renormalised over the draft vocabulary, and `mass` its probability of that
vocabulary: the gradient is that of KL(p_all || q) over the tokens that the head can draft. Logits are computed
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
                loss, mass = checkpoint(_divergences, *inputs, mine, theirs, use_reentrant=False)
            else:
                loss, mass = _divergences(*inputs, mine, theirs)
            share = weights[rows.rollout[part]] * decay
            total = total + (share * loss).sum()
            weight += share.sum()
            divergence[place] += loss.detach().sum()
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


def _divergences(
    head: Eagle3Head, policy: TargetModel, settings: LearningSettings, output: Tensor, policy_output: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mass * KL and mass of rows, [n] each."""
    with torch.no_grad():
        theirs, mass = _targets(policy, head.tokens, settings, policy_output)
    return kd_loss(head.logits(output).float(), theirs.contiguous(), mass), mass
