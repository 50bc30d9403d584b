"""Online learner of the drafter: an EAGLE-3 head, its optimizer, and the target model that teaches it.

    learner = Learner(policy_path, settings, checkpoint=None)
    learner.set_policy(path, version)              # the policy that sampled the next rollouts
    report = learner.update(rollouts, weights)     # a few optimizer steps
    candidate = learner.evaluate(held_out)
    checkpoint = learner.save(parent, version)

Not thread-safe. Gradients flow through the head only, not through the policy's features, embeddings and
distribution.

Training may be data-parallel over the ranks of torch.distributed: each takes its share of every step, and
gradients are summed. All ranks get the same samples and hold the same weights, so they take the same decisions
without communication. A process without torch.distributed is the only rank.
"""

from __future__ import annotations

import hashlib
import io
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from services.contracts import drafter_checkpoint as checkpoints
from services.contracts.drafter_checkpoint import Checkpoint, CorruptCheckpoint
from services.contracts.errors import DataLoss
from services.contracts.files import write_durably
from services.drafter.learning.data import Evaluation, LearningSettings, TrainingSample, UpdateReport
from services.drafter.learning.head import Eagle3Head, HeadShape
from services.drafter.learning.objective import distill, evaluate
from services.drafter.learning.target import TargetModel, choose_vocabulary, start_from_policy
from services.drafter.learning.unroll import Unroll, make_pass, passes, steps

_RATE = 0.64
"""Learning rate of AdamW, times the hidden size."""
_MAGIC = b"paceline-drafter-state-1\n"
_DIGEST = hashlib.sha256().digest_size


class CorruptState(DataLoss):
    """The file holds no usable state; `what` is the reason."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"learner state {path}: {what}")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, containers of them) to `path`, replacing it. OSError: cannot be written."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        write_durably(fresh, _MAGIC + hashlib.sha256(content).digest() + content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def read_state(path: Path) -> dict[str, Any]:
    """Read a state of `write_state`. CorruptState: it cannot be read, or differs from what was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptState(path, f"cannot be read: {error.strerror}") from error
    start = len(_MAGIC) + _DIGEST
    if not content.startswith(_MAGIC) or len(content) < start:
        raise CorruptState(path, "is not of a learner")
    if hashlib.sha256(content[start:]).digest() != content[len(_MAGIC) : start]:
        raise CorruptState(path, "is truncated or corrupt")
    found: dict[str, Any] = torch.load(io.BytesIO(content[start:]), map_location="cpu", weights_only=True)
    return found


class Learner:
    """A head that is trained in place. Its saved state is one file, written atomically, verified by SHA-256."""

    def __init__(self, policy_path: Path, settings: LearningSettings, checkpoint: Path | None = None) -> None:
        """Begin from a checkpoint, or with a fresh head.

        A fresh head with a reduced vocabulary chooses its draft tokens in its first update.

        Raises:
            PolicyMismatch: no head can draft for the policy.
            CorruptCheckpoint: the checkpoint cannot be used, or is a drafter for another policy.
        """
        self.settings = settings
        self.policy = TargetModel(policy_path, 0, settings)
        self._generator = torch.Generator().manual_seed(settings.seed)
        if checkpoint is None:
            self._begin(Eagle3Head(self.policy.head_shape(settings)))
            start_from_policy(self.head, self.policy, self._generator)
            self._names_tokens = self.head.tokens is None
        else:
            self._begin(self._read_head(checkpoint, ""))
            self._names_tokens = True

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of its checkpoints."""
        return self.head.shape.config()

    def set_policy(self, path: Path, version: int) -> None:
        """Load the weights that targets are computed with. PolicyMismatch: they do not fit."""
        self.policy.load(path, version)

    def adopt(self, checkpoint: Path, sha256: str = "") -> None:
        """Continue from another drafter, with a fresh optimizer. CorruptCheckpoint: it does not fit."""
        self._begin(self._read_head(checkpoint, sha256))
        self._names_tokens = True

    def update(self, rollouts: Sequence[TrainingSample], weights: Sequence[float]) -> UpdateReport:
        """Learn from samples of the policy, with a weight w(r) for each. All ranks pass the same samples.

        ValueError: not as many weights as samples, a weight that is not positive and finite, or a token outside the
        vocabulary of the policy.
        """
        began = time.perf_counter()
        if len(rollouts) != len(weights):
            raise ValueError(f"{len(rollouts)} rollouts, but {len(weights)} weights")
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise ValueError(f"weights must be positive and finite, got {weight}")
        used = self._usable(rollouts)
        if not self._names_tokens and used:
            self._name_tokens([rollouts[place] for place in used])
        done: list[tuple[Tensor, float | None]] = []
        for _ in range(self.settings.epochs):
            order = [used[i] for i in torch.randperm(len(used), generator=self._generator).tolist()]
            for step in steps([rollouts[place] for place in order], self.settings.batch_tokens):
                mine = _of_this_rank([order[i] for i in step])
                done.append(self._step([rollouts[i] for i in mine], [weights[i] for i in mine]))
        norms = [norm for _, norm in done if norm is not None]
        sums = torch.zeros(2, self.settings.depth, dtype=torch.float64)
        for found, norm in done:
            if norm is not None:
                sums += found.cpu().view_as(sums)
        (divergence, mass), whole = sums.tolist(), sums.sum(1).tolist()
        return UpdateReport(
            kd_loss=whole[0] / whole[1] if whole[1] else float("nan"),
            by_place=tuple(d / m if m else float("nan") for d, m in zip(divergence, mass, strict=True)),
            samples=len(used),
            tokens=sum(rollouts[place].drafted for place in used),
            left_out=len(rollouts) - len(used),
            steps=len(norms),
            skipped=len(done) - len(norms),
            gradient_norm=norms[-1] if norms else 0.0,
            seconds=time.perf_counter() - began,
        )

    def evaluate(self, rollouts: Sequence[TrainingSample], drafter: Path | None = None) -> Evaluation:
        """Evaluate the head, or the drafter in a folder, on samples of the policy.

        Samples that `update` would leave out are ignored. CorruptCheckpoint: `drafter` cannot be used.
        """
        head = self.head if drafter is None else self._read_head(drafter, "")
        return evaluate(head, self.policy, [rollouts[i] for i in self._usable(rollouts)], self.settings)

    def save(self, parent: Path, version: int) -> Checkpoint:
        """Write the head as a checkpoint under `parent` and return it. OSError: it cannot be written."""
        dtype = getattr(torch, self.settings.checkpoint_dtype)
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.head.tensors().items()
        }
        return checkpoints.save(parent, version, self.config, tensors)

    def save_state(self, path: Path) -> None:
        """Write all that updates depend on, except the policy, atomically; resumed updates are bit-identical."""
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
        """Continue from a state of `save_state`. CorruptState: it cannot be used; nothing changes."""
        state = read_state(path)
        try:
            head = Eagle3Head(self._fitting(state["config"]))
        except ValueError as error:
            raise CorruptState(path, str(error)) from error
        head.load_state_dict(state["head"])
        self._begin(head)
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]
        self._generator.set_state(state["generator"])
        self._names_tokens = state["names_tokens"]

    def _begin(self, head: Eagle3Head) -> None:
        self.head = head.to(self.policy.device)
        self._unroll = Unroll(self.head, self.settings.chunk_entries)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=self.settings.lr or _RATE / self.head.shape.hidden_size,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )
        self._rate = self._optimizer.param_groups[0]["lr"]
        self._steps = 0

    def _read_head(self, path: Path, sha256: str) -> Eagle3Head:
        config, tensors = checkpoints.load(path, sha256)
        try:
            head = Eagle3Head(self._fitting(config))
        except ValueError as error:
            raise CorruptCheckpoint(path, str(error)) from error
        head.load_state_dict({name: tensor.float() if tensor.is_floating_point() else tensor
                              for name, tensor in tensors.items()})  # fmt: skip
        return head.to(self.policy.device)

    def _fitting(self, config: dict[str, Any]) -> HeadShape:
        """Return the shape that a config describes. ValueError: the head is for another policy."""
        shape, own = HeadShape.of(config), self.policy.head_shape(self.settings)
        is_own = (shape.hidden_size, shape.vocab_size) == (own.hidden_size, own.vocab_size)
        if not is_own or not self.policy.has_layers(shape.layers):
            raise ValueError("it belongs to a drafter for another policy")
        return shape

    def _usable(self, rollouts: Sequence[TrainingSample]) -> list[int]:
        """Return the indices of usable samples. ValueError: a token outside the vocabulary of the policy."""
        found = []
        for place, rollout in enumerate(rollouts):
            tokens = rollout.tokens
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.policy.vocabulary:
                name = f"{rollout.prompt_id}/{rollout.slot}"
                raise ValueError(f"rollout {name} has tokens outside [0, {self.policy.vocabulary})")
            if rollout.prompt and rollout.drafted and len(tokens) <= self.head.shape.max_positions:
                found.append(place)
        return found

    def _name_tokens(self, rollouts: Sequence[TrainingSample]) -> None:
        size = self.head.shape.draft_vocab_size
        chosen = choose_vocabulary(rollouts, self.policy.vocabulary, size)
        self.head.set_vocabulary(torch.tensor(chosen, device=self.policy.device))
        start_from_policy(self.head, self.policy, self._generator)
        self._names_tokens = True

    def _step(
        self, rollouts: Sequence[TrainingSample], weights: Sequence[float]
    ) -> tuple[Tensor, float | None]:
        """Take one optimizer step, on every rank.

        Returns divergence and mass of each draft position, [2 * depth], and the norm of `_apply`.
        """
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
        if _has_ranks():
            _sum_gradients(list(self.head.parameters()))
            distributed.all_reduce(sums)
        total, weight = sums[:2].tolist()
        return sums[2:], self._apply(total, weight)

    def _apply(self, total: float, weight: float) -> float | None:
        """Step by the summed gradients and return their norm; None if it was skipped as not finite."""
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


def _has_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _of_this_rank(places: list[int]) -> list[int]:
    """Return this rank's share of `places`."""
    return places[distributed.get_rank() :: distributed.get_world_size()] if _has_ranks() else places


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum each gradient over ranks, in place; a missing one counts as zeros."""
    flat = torch.cat(
        [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in parameters]
    )
    distributed.all_reduce(flat)
    for each, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        each.grad = part.view_as(each).clone()
