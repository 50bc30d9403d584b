"""Training job of the synchronous client: its rollouts, its weights, its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, Unpack

from paceline import types as t
from paceline.blocking import Face, blocking, entered, finish, iterate
from paceline.blocking_rollout import OpenBatch, Rollout
from paceline.blocking_sessions import Sessions
from paceline.look_ahead import RolloutOptions
from paceline.run import AsyncRun

if TYPE_CHECKING:
    from paceline.client import Client


class Run(Face[AsyncRun]):
    """One training job.

    The nth batch of a step and policy version always has the same id, so that a trainer that was restarted gets the
    samples that exist already.
    """

    def __init__(self, client: Client, core: AsyncRun) -> None:
        super().__init__(core)
        self.client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        """Acknowledge what was read, unless an exception ends the run."""
        if raised is None:
            self.close()

    def close(self) -> None:
        """Acknowledge all batches that were read to their ends: nobody will read them again."""
        self._core.close()

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self._core.run_id

    def rollout(
        self,
        step: int,
        groups: Iterable[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        weight: int = 1,
        max_staleness: int | None = None,
        stale: t.Stale = t.Stale.REFUSE,
    ) -> Rollout:
        """Submit a batch and return its samples as an iterable, in completion order.

        Seeds come of run, step, prompt and slot: the same prompt ids again in a step give the same samples again. A
        warning says so; for other samples use other prompt ids, or more samples a group.

        The samples are of the published policy version unless `policy_version` names another. Batches of higher
        `priority` are placed first; within one, runs share the instances by `weight`. A batch that is too large for
        one call (16 MiB, 65,536 samples) is submitted in parts and read as one, a part at a time in turn. Those of
        earlier steps that were read to their ends are acknowledged: they cannot be read again. With `max_staleness`
        the batch goes on across versions that are pushed meanwhile, and `stale` says what becomes of unfinished
        samples whose first token is more than so many versions behind.
        """
        submitting = self._core.rollout(
            step,
            groups,
            sampling,
            exactness=exactness,
            policy_version=policy_version,
            deadline=deadline,
            priority=priority,
            weight=weight,
            max_staleness=max_staleness,
            stale=stale,
        )
        return Rollout(finish(submitting))

    def rollouts(
        self,
        batches: Iterable[Iterable[t.Group]],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        first_step: int = 0,
        **options: Unpack[RolloutOptions],
    ) -> Iterator[Rollout]:
        """Submit a batch for each step and yield its samples as `rollout` returns them.

        Each batch is announced while the one before it is generated, so that idle instances generate it ahead.
        `batches` gives the groups of each step: a list, a generator, a data loader, or for the asynchronous client
        an asynchronous iterable. It is read one batch ahead of the steps, so it must not depend on the samples of
        the step before. A trainer that was restarted gives the batches from `first_step` on. `options` are those of
        `rollout`.
        """
        for each in iterate(
            self._core.rollouts(batches, sampling, exactness=exactness, first_step=first_step, **options)
        ):
            yield Rollout(each)

    def stats(self, step: int) -> dict[str, float]:
        """Return figures of the samples of a step that were read so far, flat, for a logger of experiments.

        Names begin with `rollout/`; docs/sdk.md lists them. Those of the last 8 steps are kept. ValueError: no
        samples of the step were asked for by this object.
        """
        return self._core.stats(step)

    @contextmanager
    def open_batch(
        self,
        step: int,
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        weight: int = 1,
        max_staleness: int | None = None,
        stale: t.Stale = t.Stale.REFUSE,
    ) -> Iterator[OpenBatch]:
        """Open a batch, to which groups are added while its samples are generated and read; close it when left.

        An exception leaves it open, for a trainer that is restarted and opens it again; the gateway closes a batch
        that nobody has to do with. Without `max_staleness` the samples are of the batch's version. With it, the
        batch goes on across versions that are pushed meanwhile, and `stale` says what becomes of unfinished samples
        whose first token is more than so many versions behind. The other parameters are those of `rollout`.
        """
        opening = self._core.open_batch(
            step,
            sampling,
            exactness=exactness,
            policy_version=policy_version,
            deadline=deadline,
            priority=priority,
            weight=weight,
            max_staleness=max_staleness,
            stale=stale,
        )
        with entered(opening) as opened:
            yield OpenBatch(opened)

    @contextmanager
    def sessions(
        self,
        step: int,
        tools: t.ToolUse,
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        weight: int = 1,
        max_staleness: int | None = None,
    ) -> Iterator[Sessions]:
        """Open a batch whose samples call tools; end what is unfinished of it when left.

        An exception leaves it open, for a trainer that is restarted and begins the same sessions again. With
        `max_staleness` they go on under versions that are pushed meanwhile, and end when they are further behind.
        The other parameters are those of `rollout`; `max_tokens` counts what environments say, too.
        """
        opening = self._core.sessions(
            step,
            tools,
            sampling,
            exactness=exactness,
            policy_version=policy_version,
            deadline=deadline,
            priority=priority,
            weight=weight,
            max_staleness=max_staleness,
        )
        with entered(opening) as sessions:
            yield Sessions(sessions)

    hint = blocking(AsyncRun.hint)
    report_rewards = blocking(AsyncRun.report_rewards)
    push_weights = blocking(AsyncRun.push_weights)
    push_adapter = blocking(AsyncRun.push_adapter)
    finish_push = blocking(AsyncRun.finish_push)
    end = blocking(AsyncRun.end)
