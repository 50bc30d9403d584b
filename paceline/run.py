"""A training job as seen by its trainer: rollouts of a step, and weights after it.

    with client.run("run-1", seed=7, weights=folder) as run:
        for step in range(steps):
            samples = list(run.rollout(step, groups, SamplingParams(max_tokens=512)))
            run.push_weights(learner.update(samples))

A trainer that was restarted asks for the same batches and gets the samples that exist already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import calls
from paceline import types as t
from paceline.weights import WeightFolder, push

if TYPE_CHECKING:
    from paceline.client import Client

Source = Path | str | Mapping[str, Any]
"""Weights: a folder in Hugging Face layout, or tensors by name."""


@dataclass(slots=True)
class Plan:
    """What sync and async runs share: names, seeds, and where weights are written.

    The nth batch of a step always has the same id, so that a trainer that was restarted and asks again
    gets the samples that exist already.
    """

    run_id: str
    seed: int
    weights: WeightFolder | None
    _batches: dict[int, int] = field(default_factory=dict)

    def submit(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None,
        exactness: t.Exactness | None,
        policy_version: int | None,
        deadline: float | None,
    ) -> calls.Steps[tuple[t.Batch, t.Submitted]]:
        """Submits the next batch of a step, for the current version unless another is named."""
        if policy_version is None:
            versions: t.Versions = yield calls.versions()
            policy_version = versions.policy_version
        batch = t.Batch(
            run_id=self.run_id,
            batch_id=self._next_id(step),
            step=step,
            policy_version=policy_version,
            groups=groups,
            sampling=sampling or t.SamplingParams(),
            exactness=exactness or t.Exactness(),
            run_seed=self.seed,
            deadline=deadline,
        )
        submitted: t.Submitted = yield calls.submit(batch)
        self._batches[step] = self._batches.get(step, 0) + 1
        return batch, submitted

    def hint(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None,
        expected_version: int,
        exactness: t.Exactness | None,
    ) -> t.BatchHint:
        """The hint for a step to come."""
        sampling, exactness = sampling or t.SamplingParams(), exactness or t.Exactness()
        return t.BatchHint(self.run_id, step, expected_version, groups, sampling, exactness, self.seed)

    def push(self, source: Source, target: t.WeightTarget) -> calls.Steps[t.UpdateFinished]:
        """Sends weights; a folder that was given is sent as it is, and never removed."""
        finished: t.UpdateFinished = yield from push(self.run_id, target, lambda v: self._folder(v, source))
        if self.weights is not None:
            yield calls.Local(self.weights.prune)
        return finished

    def _next_id(self, step: int) -> str:
        return f"step-{step:06d}.{self._batches.get(step, 0)}"

    def _folder(self, version: int, source: Source) -> Path:
        if not isinstance(source, Mapping):
            return Path(source).absolute()
        if self.weights is None:
            raise ValueError("to push tensors, open the run with weights=WeightFolder(...)")
        return self.weights.write(version, source)


class Run:
    """One training job on a sync client. Leaving it ends nothing on the service: work can be resumed."""

    def __init__(self, client: Client, run_id: str, seed: int, weights: WeightFolder | None) -> None:
        self.client = client
        self._plan = Plan(run_id, seed, weights)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held that would have to be given back."""

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self._plan.run_id

    def rollout(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
    ) -> Rollout:
        """Submits a batch and returns its samples as an iterable, in completion order."""
        steps = self._plan.submit(step, groups, sampling, exactness, policy_version, deadline)
        return Rollout(self.client, *self.client.follow(steps))

    def hint(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        expected_version: int,
        exactness: t.Exactness | None = None,
    ) -> int:
        """Names the prompts of a step to come; returns how many samples may be pre-generated."""
        return self.client.hint(self._plan.hint(step, groups, sampling, expected_version, exactness))

    def report_rewards(
        self,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Reports the rewards of a batch, and what its update measured; returns how many samples were known."""
        return self.client.report_rewards(self.run_id, batch_id, rewards, kl=kl, clip_fraction=clip_fraction)

    def push_weights(
        self, source: Source, target: t.WeightTarget = t.WeightTarget.POLICY
    ) -> t.UpdateFinished:
        """Sends weights as the next version. When this returns, the fleet serves them.

        `source` is a folder in Hugging Face layout, or tensors by name (numpy or torch), which are
        written to the run's `WeightFolder`. An error leaves the version that was served.
        """
        return self.client.follow(self._plan.push(source, target))


class Rollout:
    """The samples of a submitted batch. Each is given once, over all iterations together."""

    def __init__(self, client: Client, batch: t.Batch, submitted: t.Submitted) -> None:
        self._client = client
        self.batch = batch
        self.submitted = submitted
        self.cursor = 0
        """Place in the batch's stream."""

    def __len__(self) -> int:
        """Samples wanted."""
        return self.submitted.samples

    def __iter__(self) -> Iterator[t.Sample]:
        for event in self._client.stream(self.batch.run_id, self.batch.batch_id, self.cursor):
            self.cursor = event.cursor
            yield event.sample

    def cancel(self, *, keep_partial: bool = False) -> int:
        """Ends what is unfinished; those samples are delivered as ABORTED."""
        return self._client.cancel(self.batch.run_id, self.batch.batch_id, keep_partial=keep_partial)
