"""GRPO in plain PyTorch: group-normalised advantages and a clipped policy gradient.

The loss is the mean over the tokens of a sample, then over samples. With a mean over all tokens, the few
responses that never end would dominate it.

Use:

    learner = GrpoLearner(model, GrpoSettings())
    report = learner.step(samples)    # one training step on the samples of the current policy
    weights = learner.model.state_dict()
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.tinymath.objective import group_advantages, kl_penalty, micro_batches, policy_loss, sum_of_means


@dataclass(frozen=True, slots=True)
class GrpoSample:
    """One finished response; samples with the same `group` answer the same prompt."""

    group: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """Behaviour log-probabilities in nats, one for each response token."""
    reward: float


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """Hyperparameters of GRPO."""

    lr: float = 5e-4
    warmup: int = 4
    """Optimizer steps over which the learning rate rises, as Adam's first steps follow the noise of few samples."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Ratios to the behaviour policy are clipped to [1 - clip_low, 1 + clip_high]."""
    kl: float = 0.0
    """Weight of the divergence from the initial policy; with 0 no copy of it is kept."""
    max_grad_norm: float = 1.0
    updates: int = 4
    """Optimizer steps for one batch of samples; each takes an equal share of the samples, in their order."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moments: the usual 0.999 would outlast a short run."""
    micro_tokens: int = 8192
    """Tokens of one forward pass, including padding."""


@dataclass(frozen=True, slots=True)
class GrpoReport:
    """Means over one step."""

    reward: float
    loss: float
    """Loss of the last update; `grad_norm` is also of the last update."""
    grad_norm: float
    clipped_ratio: float
    """Share of the trained tokens with a ratio outside the clip range at the time of their update."""
    kl: float
    """Divergence of the policy from the sampling policy, over the same tokens at the same times (see `Drift`)."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Drift of the policy from the sampling policy, summed over tokens.

    `divergence` sums e^r - r - 1 with r = log p_policy - log p_behaviour: its mean estimates
    KL(behaviour || policy), is never negative, and is 0 where the two agree.
    """

    tokens: int = 0
    outside: float = 0.0
    """Number of tokens with a ratio e^r outside the clip range."""
    divergence: float = 0.0

    def __add__(self, other: Drift) -> Drift:
        return Drift(
            self.tokens + other.tokens, self.outside + other.outside, self.divergence + other.divergence
        )

    @property
    def clipped_ratio(self) -> float:
        """Share of tokens outside the clip range."""
        return self.outside / max(1, self.tokens)

    @property
    def kl(self) -> float:
        """Estimate of the divergence, in nats."""
        return self.divergence / max(1, self.tokens)


def response_logprobs(model: nn.Module, samples: Sequence[GrpoSample]) -> Tensor:
    """Return the log-probabilities of all response tokens, one sample after another, shape [tokens].

    Rows are padded on the right, where causal attention of other tokens never sees it, so no mask is needed.
    """
    rows = [[*sample.prompt_ids, *sample.response_ids] for sample in samples]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    logprobs = model(input_ids=ids[:, :-1], use_cache=False).logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    spans = [(len(sample.prompt_ids) - 1, len(row) - 1) for sample, row in zip(samples, rows, strict=True)]
    return torch.cat([line[first:last] for line, (first, last) in zip(chosen, spans, strict=True)])


class GrpoLearner:
    """Policy and its optimizer; `step` changes the policy in place."""

    def __init__(self, model: nn.Module, settings: GrpoSettings) -> None:
        self.model = model
        self.settings = settings
        self.reference = copy.deepcopy(model).eval() if settings.kl else None
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: min(1.0, (done + 1) / max(1, settings.warmup))
        )

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` resumes from; `torch.save` takes it."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner with the same model and settings."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    @property
    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self, samples: Sequence[GrpoSample]) -> GrpoReport:
        """Train one step on the samples of one policy version; groups must be whole."""
        advantages = group_advantages([s.reward for s in samples], [s.group for s in samples])
        size = -(-len(samples) // self.settings.updates)
        drift = Drift()
        for first in range(0, len(samples), size):
            loss, norm, moved = self._update(samples[first : first + size], advantages[first : first + size])
            drift += moved
        reward = sum(sample.reward for sample in samples) / len(samples)
        return GrpoReport(reward, loss, norm, drift.clipped_ratio, drift.kl)

    @torch.no_grad()
    def drift(self, samples: Sequence[GrpoSample]) -> Drift:
        """Measure the drift from the sampling policy, by a forward pass of all samples."""
        total = Drift()
        lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
        for batch in micro_batches(lengths, self.settings.micro_tokens):
            places = [samples[i] for i in batch]
            total += self._drift(response_logprobs(self.model, places), _behaviour(places))
        return total

    def _update(
        self, samples: Sequence[GrpoSample], advantages: Sequence[float]
    ) -> tuple[float, float, Drift]:
        """Do one optimizer step; return the loss, the gradient norm, and the drift before the step."""
        # A sample without advantage has no gradient, except from the divergence from the reference.
        used = [i for i, a in enumerate(advantages) if a or self.reference is not None]
        total, drift = 0.0, Drift()
        lengths = [len(samples[i].prompt_ids) + len(samples[i].response_ids) for i in used]
        for batch in micro_batches(lengths, self.settings.micro_tokens):
            places = [used[i] for i in batch]
            losses, moved = self._losses([samples[i] for i in places], [advantages[i] for i in places])
            loss = sum_of_means(losses, [len(samples[i].response_ids) for i in places]) / len(samples)
            loss.backward()
            total, drift = total + float(loss.detach()), drift + moved
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total, float(norm), drift

    def _losses(self, samples: Sequence[GrpoSample], advantages: Sequence[float]) -> tuple[Tensor, Drift]:
        """Return the loss of each token, shape [tokens], and the drift of the tokens."""
        now, before = response_logprobs(self.model, samples), _behaviour(samples)
        gain = torch.tensor([a for s, a in zip(samples, advantages, strict=True) for _ in s.response_ids])
        low, high = self.settings.clip_low, self.settings.clip_high
        losses = policy_loss(now, before, gain, low, high)
        if self.reference is not None:
            with torch.no_grad():
                reference = response_logprobs(self.reference, samples)
            losses = losses + self.settings.kl * kl_penalty(now, reference)
        return losses, self._drift(now.detach(), before)

    def _drift(self, now: Tensor, before: Tensor) -> Drift:
        """Return the drift of tokens, both shapes [tokens]."""
        ratio = (now - before).exp()
        outside = (ratio < 1 - self.settings.clip_low) | (ratio > 1 + self.settings.clip_high)
        return Drift(len(now), float(outside.sum()), float(kl_penalty(before.double(), now.double()).sum()))


def _behaviour(samples: Sequence[GrpoSample]) -> Tensor:
    """Return the behaviour log-probabilities of all response tokens, shape [tokens]."""
    return torch.tensor([value for sample in samples for value in sample.logprobs])
