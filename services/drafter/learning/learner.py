"""The online learner: a head, its optimizer, and the policy that teaches it.

    learner = Learner(policy_path, settings, checkpoint=None)
    learner.set_policy(path, version)              # what the coming rollouts were sampled by
    report = learner.update(rollouts, weights)     # a few optimizer steps
    candidate = learner.evaluate(held_out)
    checkpoint = learner.save(parent, version)

Not safe for several threads. The gradient goes through the current head alone: the policy's features, embeddings
and distribution are computed without one, and nothing that was drafted earlier is learned from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.drafter import checkpoint as checkpoints
from services.drafter.checkpoint import Checkpoint, CorruptCheckpoint
from services.drafter.learning import ranks
from services.drafter.learning.batches import make_pass, passes, steps
from services.drafter.learning.evaluation import Evaluation, evaluate
from services.drafter.learning.head import Head, HeadShape
from services.drafter.learning.initial import start_from_policy
from services.drafter.learning.loss import distill
from services.drafter.learning.settings import LearningSettings
from services.drafter.learning.state import CorruptState, read_state, write_state
from services.drafter.learning.target import Policy
from services.drafter.learning.unroll import Unroll
from services.drafter.learning.vocabulary import choose_vocabulary
from services.drafter.rollout import Rollout

_RATE = 0.64
"""Of AdamW, times the hidden size."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update; losses are those before each step was taken."""

    kd_loss: float
    """KL(policy || drafter) in nats, mean over rows and places, unweighted; NaN where nothing could be computed."""
    by_place: tuple[float, ...]
    """The same of each place of a draft."""
    samples: int
    tokens: int
    """Response tokens learned from, each once."""
    left_out: int
    """Rollouts that could not be used: too short to draft for, or too long for the model."""
    steps: int
    """Of the optimizer, taken."""
    skipped: int
    """Steps not taken because a loss or gradient was not finite; weights and optimizer are as they were."""
    gradient_norm: float
    """Of the last step taken, before clipping."""
    seconds: float


class Learner:
    """Holds a head and changes it in place."""

    def __init__(self, policy_path: Path, settings: LearningSettings, checkpoint: Path | None = None) -> None:
        """Begin from a checkpoint, or with a fresh head.

        A fresh head of a large vocabulary takes the tokens that it can draft from the rollouts of its first update.

        Raises:
            PolicyMismatch: a policy that cannot be followed.
            CorruptCheckpoint: a checkpoint that cannot be used, or is of a drafter for another policy.
        """
        self.settings = settings
        self.policy = Policy(policy_path, 0, settings)
        self._generator = torch.Generator().manual_seed(settings.seed)
        if checkpoint is None:
            self._begin(Head(self.policy.head_shape(settings)))
            start_from_policy(self.head, self.policy, self._generator)
            self._names_tokens = self.head.tokens is None
        else:
            self._begin(self._read_head(checkpoint, ""))
            self._names_tokens = True

    @property
    def config(self) -> dict[str, Any]:
        """config.json of its checkpoints."""
        return self.head.shape.config()

    def set_policy(self, path: Path, version: int) -> None:
        """The weights that targets come from. PolicyMismatch: they do not fit, and those before stay."""
        self.policy.load(path, version)

    def adopt(self, checkpoint: Path, sha256: str = "") -> None:
        """Go on from another drafter, with a fresh optimizer. CorruptCheckpoint: it does not fit; as before."""
        self._begin(self._read_head(checkpoint, sha256))
        self._names_tokens = True

    def update(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> UpdateReport:
        """Learn from rollouts that the policy sampled, `weights` being w(r) of each.

        On several ranks all are given the same ones. ValueError: not as many weights as rollouts, a weight that is
        not positive and finite, or a token that the policy does not have.
        """
        began = time.perf_counter()
        self._check(rollouts, weights)
        used = self._usable(rollouts)
        if not self._names_tokens and used:
            self._name_tokens([rollouts[place] for place in used])
        progress = _Progress(self.settings.depth, self.policy.device)
        for _ in range(self.settings.epochs):
            order = [used[i] for i in torch.randperm(len(used), generator=self._generator).tolist()]
            for step in steps([rollouts[place] for place in order], self.settings.batch_tokens):
                mine = ranks.own([order[i] for i in step])
                self._step([rollouts[i] for i in mine], [weights[i] for i in mine], progress)
        return progress.report(
            len(used),
            sum(rollouts[place].drafted for place in used),
            len(rollouts) - len(used),
            time.perf_counter() - began,
        )

    def evaluate(self, rollouts: Sequence[Rollout], drafter: Path | None = None) -> Evaluation:
        """How far drafts for these rollouts of the policy are accepted: by the head, or by another drafter's.

        Rollouts that `update` would leave out do not count. CorruptCheckpoint: `drafter` cannot be used.
        """
        head = self.head if drafter is None else self._read_head(drafter, "")
        return evaluate(head, self.policy, [rollouts[i] for i in self._usable(rollouts)], self.settings)

    def save(self, parent: Path, version: int) -> Checkpoint:
        """The head as a checkpoint under `parent`. OSError: the disk does not take it."""
        dtype = getattr(torch, self.settings.checkpoint_dtype)
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.head.tensors().items()
        }
        return checkpoints.save(parent, version, self.config, tensors)

    def save_state(self, path: Path) -> None:
        """Everything that updates depend on but the policy, atomically: resumed, they go on bit for bit."""
        write_state(
            path,
            {
                "config": self.config,
                "head": self.head.tensors(),
                "optimizer": self._optimizer.state_dict(),
                "steps": self._steps,
                "generator": self._generator.get_state(),
                "names_tokens": self._names_tokens,
            },
        )

    def load_state(self, path: Path) -> None:
        """Take up what `save_state` wrote. CorruptState: it cannot be used, and nothing has changed."""
        state = read_state(path)
        try:
            head = Head(self._fitting(state["config"]))
        except ValueError as error:
            raise CorruptState(path, str(error)) from error
        head.load_state_dict(state["head"])
        self._begin(head)
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]
        self._generator.set_state(state["generator"])
        self._names_tokens = state["names_tokens"]

    def _begin(self, head: Head) -> None:
        self.head = head.to(self.policy.device)
        self._unroll = Unroll(self.head, self.settings.chunk_entries)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=self.settings.lr or _RATE / self.head.shape.hidden,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )
        self._rate = self._optimizer.param_groups[0]["lr"]
        self._steps = 0

    def _read_head(self, path: Path, sha256: str) -> Head:
        config, tensors = checkpoints.load(path, sha256)
        try:
            head = Head(self._fitting(config))
        except ValueError as error:
            raise CorruptCheckpoint(path, str(error)) from error
        head.load_state_dict({name: tensor.float() if tensor.is_floating_point() else tensor
                              for name, tensor in tensors.items()})  # fmt: skip
        return head.to(self.policy.device)

    def _fitting(self, config: dict[str, Any]) -> HeadShape:
        """The shape of a head of this policy. ValueError: it is one of another policy."""
        shape, own = HeadShape.of(config), self.policy.head_shape(self.settings)
        is_own = (shape.hidden, shape.vocabulary) == (own.hidden, own.vocabulary)
        if not is_own or not self.policy.has_layers(shape.layers):
            raise ValueError("it is of a drafter for another policy")
        return shape

    def _check(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> None:
        if len(rollouts) != len(weights):
            raise ValueError(f"{len(rollouts)} rollouts, but {len(weights)} weights")
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise ValueError(f"weights must be positive and finite, got {weight}")

    def _usable(self, rollouts: Sequence[Rollout]) -> list[int]:
        """Places of the rollouts with something to draft. ValueError: a token that the policy does not have."""
        found = []
        for place, rollout in enumerate(rollouts):
            tokens = rollout.tokens
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.policy.vocabulary:
                name = f"{rollout.prompt_id}/{rollout.slot}"
                raise ValueError(f"rollout {name} has tokens outside [0, {self.policy.vocabulary})")
            if rollout.prompt and rollout.drafted and len(tokens) <= self.head.shape.max_positions:
                found.append(place)
        return found

    def _name_tokens(self, rollouts: Sequence[Rollout]) -> None:
        size = self.head.shape.draft_vocabulary
        chosen = choose_vocabulary(rollouts, self.policy.vocabulary, size)
        self.head.set_vocabulary(torch.tensor(chosen, device=self.policy.device))
        start_from_policy(self.head, self.policy, self._generator)
        self._names_tokens = True

    def _step(self, rollouts: Sequence[Rollout], weights: Sequence[float], progress: _Progress) -> None:
        """One optimizer step, on every rank."""
        sums = torch.zeros(2 + 2 * self.settings.depth, device=self.policy.device)
        for places in passes(rollouts, self.settings.micro_tokens):
            rows = make_pass([rollouts[place] for place in places], self.policy.device)
            seen = self.policy.read(rows.tokens, self.head.shape.layers)
            outputs = self._unroll(
                seen.features.float(), seen.embeddings.float(), self.settings.depth, rows.first
            )
            given = torch.tensor([weights[place] for place in places], device=self.policy.device)
            loss = distill(self.head, outputs, self.policy, seen.output, rows, given, self.settings)
            loss.total.backward()
            found = [loss.total.detach().view(1), loss.weight.view(1), loss.divergence, loss.mass]
            sums += torch.cat(found)
        ranks.sum_gradients(self.head.parameters())
        total, weight = ranks.sum_over(sums)[:2].tolist()
        progress.add(sums[2:], self._apply(total, weight))

    def _apply(self, total: float, weight: float) -> float | None:
        """Take the step that the summed gradients ask for. Returns their norm, or None if it was not taken."""
        learned = [each for each in self.head.parameters() if each.grad is not None]
        for each in learned:
            each.grad.div_(weight)
        norm = float(nn.utils.clip_grad_norm_(learned, self.settings.max_grad_norm))
        is_sound = torch.tensor([total, norm]).isfinite().all()
        if is_sound:
            done = min(1.0, (self._steps + 1) / max(self.settings.warmup_steps, 1))
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * done
            self._optimizer.step()
            self._steps += 1
        self._optimizer.zero_grad()
        return norm if is_sound else None


class _Progress:
    """Sums over the steps of an update."""

    def __init__(self, depth: int, device: torch.device) -> None:
        self._sums = torch.zeros(2, depth, dtype=torch.float64, device=device)
        self._taken = self._skipped = 0
        self._norm = 0.0

    def add(self, sums: Tensor, norm: float | None) -> None:
        """A step: divergence and mass of each place, [2 * depth], and the gradient's norm if it was taken."""
        if norm is None:
            self._skipped += 1
            return
        self._sums += sums.view_as(self._sums)
        self._taken, self._norm = self._taken + 1, norm

    def report(self, samples: int, tokens: int, left_out: int, seconds: float) -> UpdateReport:
        """What came of it."""
        (divergence, mass), whole = self._sums.tolist(), self._sums.sum(1).tolist()
        return UpdateReport(
            kd_loss=whole[0] / whole[1] if whole[1] else float("nan"),
            by_place=tuple(d / m if m else float("nan") for d, m in zip(divergence, mass, strict=True)),
            samples=samples,
            tokens=tokens,
            left_out=left_out,
            steps=self._taken,
            skipped=self._skipped,
            gradient_norm=self._norm,
            seconds=seconds,
        )
