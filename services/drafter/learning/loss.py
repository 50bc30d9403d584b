"""What a draft is worth to learn from: the divergence of the head from the policy at every place.

    sum over places k and rows of  w(rollout) * decay^k * mass * KL(p || q)

p is the policy's distribution over the draft vocabulary, renormalised, and `mass` what it puts there: the gradient
is that of KL(p_all || q) over the part that the head can name. Logits are made in pieces of bounded size, and made
again for the backward pass where there is more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.kd_loss import kd_loss
from services.drafter.learning.batches import Pass
from services.drafter.learning.head import Head
from services.drafter.learning.settings import LearningSettings, Targets
from services.drafter.learning.target import Policy


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums over one pass.

    total: the weighted loss, with a gradient; weight: what to divide it by.
    divergence and mass [depth]: mass * KL and mass of each place, unweighted, without gradient.
    """

    total: Tensor
    weight: Tensor
    divergence: Tensor
    mass: Tensor


def distill(
    head: Head,
    outputs: Sequence[Tensor],
    policy: Policy,
    policy_output: Tensor,
    rows: Pass,
    weights: Tensor,
    settings: LearningSettings,
) -> Loss:
    """The loss of one pass.

    Args:
        outputs: of `Unroll`, one for each place.
        policy_output: [B, L, h] of the policy.
        weights: [B] float32, w(r) of the pass's rollouts.
    """
    teach = teacher(policy, head.tokens, settings)
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
                loss, mass = checkpoint(_divergences, head, teach, mine, theirs, use_reentrant=False)
            else:
                loss, mass = _divergences(head, teach, mine, theirs)
            share = weights[rows.rollout[part]] * decay
            total = total + (share * loss).sum()
            weight += share.sum()
            divergence[place] += loss.detach().sum()
            masses[place] += mass.sum()
    return Loss(total, weight, divergence, masses)


Teacher = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Last outputs [n, h] of the policy -> logits over the draft vocabulary [n, d], and the mass there, [n]."""


def teacher(policy: Policy, tokens: Tensor | None, settings: LearningSettings) -> Teacher:
    """What the head is taught; `tokens` are those of its rows, None for all."""

    def teach(output: Tensor) -> tuple[Tensor, Tensor]:
        logits = policy.logits(output).float()
        if settings.targets is Targets.TOP_K:
            logits = keep_top(logits, settings.top_k)
        if tokens is None:
            return logits, torch.ones(len(logits), device=logits.device)
        inside = logits[:, tokens]
        mass = (inside.logsumexp(-1) - logits.logsumexp(-1)).exp()
        # A row of which the head can name nothing has nothing to teach it: mass 0.
        return torch.where(mass.unsqueeze(1) > 0, inside, 0.0), mass

    return teach


def keep_top(logits: Tensor, k: int) -> Tensor:
    """The k highest of each row [n, V], the rest -inf: log-probabilities stored at generation, renormalised."""
    if k >= logits.shape[-1]:
        return logits
    lowest = logits.topk(k, -1).values[:, -1:]
    return torch.where(logits < lowest, -torch.inf, logits)


def _divergences(head: Head, teach: Teacher, output: Tensor, policy_output: Tensor) -> tuple[Tensor, Tensor]:
    """mass * KL and mass of rows, [n] each."""
    with torch.no_grad():
        theirs, mass = teach(policy_output)
    return kd_loss(head.logits(output).float(), theirs.contiguous(), mass), mass
