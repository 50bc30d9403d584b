"""Loss of the head in training, and evaluation of the drafts that it makes on finished samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.coupled_sampler.sample import sample
from kernels.kd_loss import kd_loss
from services.drafter.learning.data import Evaluation, LearningSettings, Targets, TrainingSample
from services.drafter.learning.head import Eagle3Head
from services.drafter.learning.target import TargetModel
from services.drafter.learning.unroll import Pass, Unroll, make_pass, passes


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
    """Return the loss of one pass: the head's divergence from the policy, and the probability of rejection.

        sum over draft positions k and rows of  w(sample) * decay^k * ((1 - a) * mass * KL(p || q) + a *
        P(rejected))

    p is the policy's distribution renormalised over the draft vocabulary, and `mass` its probability of that
    vocabulary: the gradient is that of KL(p_all || q) over the tokens that the head can draft. P(rejected) is the
    probability that the head, drawing with the noise that gave the sample its token, draws another one
    (`rejection`), which is what a drafter is for. A small head cannot match the whole distribution; with divergence
    alone it spends capacity on unlikely tokens, few of which are ever drawn. Divergence is needed all the same: a
    head that is far off is rejected whichever way it moves a little. `a` is `acceptance_share`.

    Logits are computed in chunks of bounded size, and recomputed for the backward pass if there is more than one.

    Args:
        outputs: the outputs of `Unroll`, one for each draft position.
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

    `tokens` [d] are the tokens of the head's output rows (None: all).
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

    With `mass` 1 it is 1 - `agreement`, in float32, with a gradient, and defined for rows that teach nothing.

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
    # Nothing can be learned where the targets exclude the sampled token.
    taught = (row >= 0) & ratio.squeeze(1).isfinite()
    ratio = torch.where(taught.unsqueeze(1), ratio, 0.0)
    inside = mass.log() + torch.maximum(log_p, log_q + ratio).logsumexp(-1)
    outside = (1 - mass).clamp(min=0).log()
    return torch.where(taught, 1 - (-torch.logaddexp(outside, inside)).exp(), 1.0)


def _row_of(token: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the head's output rows for tokens, [n]; -1 where it has none. `tokens` ascend (None: all)."""
    if tokens is None:
        return token
    place = torch.searchsorted(tokens, token).clamp(max=len(tokens) - 1)
    return torch.where(tokens[place] == token, place, -1)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result for one sample, or the sum of several; expectations where draft tokens are uncertain."""

    tokens: int
    """Tokens decoded with drafts: all of a response but the first."""
    verifications: float
    """Number of verified drafts."""
    offered: NDArray[np.float64]
    """[depth]: drafts that reached this position with all earlier tokens accepted."""
    accepted: NDArray[np.float64]
    """[depth]: drafts in `offered` whose token at this position was accepted as well."""

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(
            self.tokens + other.tokens,
            self.verifications + other.verifications,
            self.offered + other.offered,
            self.accepted + other.accepted,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: the accepted ones and the one that follows; 0 without any."""
        return self.tokens / self.verifications if self.verifications else 0.0

    @property
    def by_place(self) -> tuple[float, ...]:
        """Acceptance rate of each position, given that all before it were accepted; 0 without any."""
        return tuple(float(a / o) if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True))


def nothing(depth: int) -> Replayed:
    """Return the result for no sample."""
    return Replayed(0, 0.0, np.zeros(depth), np.zeros(depth))


def replay(right: NDArray[np.float64]) -> Replayed:
    """Decode one sample with drafts of `depth` tokens, and return exact expectations.

    The tokens of the sample are fixed. A draft is accepted up to its first wrong token, the target's own token
    follows, and the next draft starts after it. Draft tokens are correct independently of each other: with
    probability 0 or 1 if drafted with the sample's own noise, otherwise with some probability between.

    Args:
        right: [depth, n]; element [k, j + k] is the probability that position k is correct in the draft made after
            j of the n tokens. The column is the token that is predicted.
    """
    depth, count = right.shape
    visits = np.zeros(count + 1)
    visits[0] = 1.0
    offered, accepted = np.zeros(depth), np.zeros(depth)
    for start in range(count):
        visit = visits[start]
        if visit == 0.0:
            continue
        places = min(depth, count - start)
        kept = visit * np.cumprod(right[np.arange(places), start + np.arange(places)])
        before = np.concatenate(([visit], kept))
        offered[:places] += before[:-1]
        accepted[:places] += kept
        # With position k wrong, k tokens are accepted and the target's own follows. It also follows when all are
        # correct, except at the end of the sample.
        visits[start + 1 : start + 1 + places] += before[:-1] - kept
        visits[min(start + places + 1, count)] += kept[-1]
    return Replayed(count, float(visits[:count].sum()), offered, accepted)


@torch.no_grad()
def evaluate(
    head: Eagle3Head, policy: TargetModel, rollouts: Sequence[TrainingSample], settings: LearningSettings
) -> Evaluation:
    """Evaluate `head` under coupled sampling on samples of `policy`, each of two or more response tokens.

    Decoding is replayed over whole samples: a draft of `depth` tokens starts where decoding would have started one,
    after the last token of each verification. A sample with a seed is drafted for with its own noise, as an
    instance does, so a draft token is correct or not. Without a seed, a draft token is correct with the probability
    that `agreement` returns. Both are exact if the policy is the one that sampled.
    """
    unroll = Unroll(head, settings.chunk_entries)
    # Whatever the training targets, the measure is the divergence from the policy's whole distribution.
    settings = replace(settings, targets=Targets.POLICY, acceptance_share=0.0)
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
    head: Eagle3Head,
    outputs: Sequence[Tensor],
    policy: TargetModel,
    policy_output: Tensor,
    rows: Pass,
    rollouts: Sequence[TrainingSample],
    settings: LearningSettings,
) -> NDArray[np.float64]:
    """Return [depth, rows]: probability that draft position k is the row's token; 0 where no draft reaches it."""
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
    """Return the tokens that the head drafts with the noise of `seeds` at `positions` in their responses, [n]."""
    count = len(logits)
    none = torch.empty(0, dtype=torch.int64, device=logits.device)
    ones = torch.ones(count, device=logits.device)
    return sample(logits.contiguous(), seeds, positions, ones, none, torch.arange(count + 1)).tokens


def agreement(target: Tensor, drafter: Tensor, tokens: Tensor) -> Tensor:
    """Return P(drafter draws the token | target drew it) with shared noise, [n] float64.

        P(argmax q = x | argmax p = x) = 1 / sum_v max(p_v, q_v p_x / q_x)

    is the probability that two Gumbel-max draws with shared noise agree: an expectation over all noise that
    explains the token x. `target` and `drafter` are logits [n, V] over the whole vocabulary, `tokens` [n].
    """
    log_p, log_q = target.double().log_softmax(-1), drafter.double().log_softmax(-1)
    at = tokens.unsqueeze(1)
    ratio = log_p.gather(1, at) - log_q.gather(1, at)
    scaled = torch.where(log_q > -torch.inf, log_q + ratio, -torch.inf)
    # The sum is inf where the drafter has no row for the token, which it then never draws.
    return 1 / torch.maximum(log_p, scaled).exp().sum(-1)


def _widen(logits: Tensor, head: Eagle3Head, vocabulary: int) -> Tensor:
    """Return logits over the whole vocabulary, [n, V]; -inf where the head has no row."""
    if head.tokens is None:
        return logits
    wide = logits.new_full((len(logits), vocabulary), -torch.inf)
    wide[:, head.tokens] = logits
    return wide
