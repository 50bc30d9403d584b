"""The batches of a training job: submitted whole, or opened and added to.

A warning is logged for likely mistakes: the same samples twice, weights of another trainer, steps without a hint.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import Self, TypeVar, Unpack

from paceline import convert
from paceline import types as t
from paceline.batches.parts import first_part
from paceline.batches.rollout import AsyncOpenBatch, AsyncRollout, StepStats
from paceline.batches.sessions import AsyncSessions
from paceline.calls import GatewayCalls
from paceline.convert.values import UINT64, integer
from paceline.errors import NotFoundError
from paceline.shards import OpenShard

log = logging.getLogger("paceline")

R = TypeVar("R", bound=AsyncRollout)

_KEPT_STEPS = 8
"""Steps whose figures, and whose requested prompts, are kept."""
_KEPT_ROLLOUTS = 8
"""Most rollouts of earlier steps that are kept although they were not read to their ends."""
_UNANNOUNCED = 3
"""Consecutive steps without an announcement after which a warning is logged."""


class RunWarnings:
    """Warnings of one training job, each given once."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._requested: dict[tuple[int, int], set[str]] = {}
        """Prompts that were requested, by step and version, of the newest steps."""
        self._knows_weights = False
        self._last_step: int | None = None
        self._announced = -1
        """Highest step that was announced."""
        self._unannounced = 0

    def announced(self, step: int) -> None:
        """Note that a step was announced."""
        self._announced = max(self._announced, step)

    def begins(self, step: int) -> None:
        """Warn of steps after the first that were not announced: nothing of them is generated ahead."""
        later, self._last_step = self._last_step is not None and step > self._last_step, step
        if not later:
            return
        self._unannounced = 0 if step <= self._announced else self._unannounced + 1
        if self._unannounced == _UNANNOUNCED:
            log.warning(
                "run %s: the last %d steps were not announced, so nothing of them was generated ahead. Give all "
                "batches to run.rollouts, or name the next prompts by run.hint, where they are known",
                self._run_id,
                _UNANNOUNCED,
            )

    def pushed(self) -> None:
        """Note that the job has pushed weights, which are served from now on."""
        self._knows_weights = True

    def served(self, published: t.Versions) -> None:
        """Warn if a job that has pushed nothing is served weights that another run object has pushed."""
        if self._knows_weights or not published.policy_checksum:
            return
        self._knows_weights = True
        log.warning(
            "run %s: version %d is served, which was pushed, and not by this run object: its samples are of those "
            "weights. Push yours first, or name policy_version=%d if that is what you want",
            self._run_id,
            published.policy_version,
            published.policy_version,
        )

    def requested(self, batch: t.Batch, groups: Iterable[t.Group]) -> None:
        """Warn of prompts that were requested before in the step of a batch: their samples have the same seeds."""
        before = self._requested.setdefault((batch.step, batch.policy_version), set())
        while len(self._requested) > _KEPT_STEPS:
            del self._requested[next(iter(self._requested))]
        requested = [group.prompt_id for group in groups]
        again = [each for each in requested if each in before]
        before.update(requested)
        if again:
            log.warning(
                "run %s: in step %d prompt %r%s was requested before: the samples of its slots are the same again, "
                "because seeds derive from run, step, prompt and slot. For other samples use another prompt_id, or "
                "request more samples in one group",
                self._run_id,
                batch.step,
                again[0],
                f" and {len(again) - 1} others" if len(again) > 1 else "",
            )


class RunRollouts:
    """Batches, hints and rewards of one training job."""

    client: GatewayCalls
    """The client that the job was opened on."""
    run_id: str
    """The job's name."""

    def __init__(self, client: GatewayCalls, run_id: str, seed: int) -> None:
        self.client = client
        self.run_id = run_id
        self._seed = seed
        self._numbers: dict[str, list[int]] = {}
        """Heap of free numbers for the batches of each step and policy version; all above the last are free."""
        self._numbering = threading.Lock()
        self._asking: dict[int, list[asyncio.Event]] = {}
        """Calls of each thread that ask for the published version, in order; the event of the first may be set."""
        self._rollouts: list[AsyncRollout] = []
        """Rollouts that are not acknowledged, of the newest step and of earlier steps that are still read."""
        self._stats: dict[int, list[StepStats]] = {}
        """Figures of the rollouts of each step, the newest step last."""
        self._warnings = RunWarnings(run_id)

    def __repr__(self) -> str:
        return f"AsyncRun({self.run_id!r}, seed={self._seed})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, raised: object, *_: object) -> None:
        """Acknowledge the batches that were read, unless an exception ends the run."""
        if raised is None:
            self.close()

    def close(self) -> None:
        """Acknowledge all batches that were read to their ends: they will not be read again."""
        self._acknowledge(math.inf)

    async def end(self) -> t.RunEnded:
        """End the job: cancel its unfinished samples, and drop everything that is kept for it, on every shard."""
        self._rollouts.clear()
        ended = await self.client.shards.all(lambda member: member.calls.end_run(self.run_id))
        return t.RunEnded(sum(each.batches for each in ended), sum(each.cancelled for each in ended))

    async def rollout(
        self,
        step: int,
        groups: Iterable[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int | None = None,
        **options: Unpack[t.BatchOptions],
    ) -> AsyncRollout:
        """Submit a batch and return its samples as an iterable, in completion order.

        Seeds derive from run, step, prompt and slot, so the same prompt ids again in a step give the same samples
        again, and a warning is logged. For other samples use other prompt ids, or more samples per group.

        The samples are of the published policy version unless `policy_version` names another. A batch that is too
        large for one call (16 MiB, 65,536 samples) is submitted in parts and read as one, the parts in turn.
        Batches of earlier steps that were read to their ends are acknowledged: they cannot be read again. `options`
        are the fields of `BatchOptions`: exactness, deadline, priority, weight, max_staleness and stale.
        """
        batch = await self._batch(step, sampling, policy_version, groups, None, **options)
        rollout = await self._begin(batch, AsyncRollout)
        self._warnings.requested(batch, batch.groups)
        self._warnings.begins(batch.step)
        return rollout

    @asynccontextmanager
    async def open_batch(
        self,
        step: int,
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int | None = None,
        **options: Unpack[t.BatchOptions],
    ) -> AsyncIterator[AsyncOpenBatch]:
        """Open a batch, to which groups are added while its samples are generated and read; close it when left.

        An exception leaves it open, for a trainer that is restarted and opens it again; the gateway closes a batch
        that no client uses. The other parameters are as in `rollout`.
        """
        opened = await self._opened(await self._batch(step, sampling, policy_version, (), None, **options))
        yield opened
        await opened.close()

    @asynccontextmanager
    async def sessions(
        self,
        step: int,
        tools: t.ToolUse,
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int | None = None,
        **options: Unpack[t.BatchOptions],
    ) -> AsyncIterator[AsyncSessions]:
        """Open a batch whose samples call tools; end its unfinished samples when left.

        An exception leaves it open, for a trainer that is restarted and begins the same sessions again. The other
        parameters are as in `rollout`, but for Stale.REGENERATE; `max_tokens` also counts the tokens of
        environments.
        """
        batch = await self._batch(step, sampling, policy_version, (), tools, **options)
        opened = await self._opened(batch)
        sessions = AsyncSessions(opened)
        yield sessions
        await sessions.leave()

    async def _opened(self, batch: t.Batch) -> AsyncOpenBatch:
        """Open a batch."""
        return await self._begin(
            batch, partial(AsyncOpenBatch, added=partial(self._warnings.requested, batch))
        )

    async def _batch(
        self,
        step: int,
        sampling: t.SamplingParams | None,
        policy_version: int | None,
        groups: Iterable[t.Group],
        tools: t.ToolUse | None,
        /,
        **options: Unpack[t.BatchOptions],
    ) -> t.Batch:
        """Return a batch of a step, of the published version unless another is named. Its id has no number yet."""
        if unknown := sorted(options.keys() - t.BatchOptions.__annotations__.keys()):
            raise TypeError(
                f"{unknown[0]!r} is not an option; options are {', '.join(t.BatchOptions.__annotations__)}"
            )
        step = integer(step, "step", *UINT64)
        if policy_version is None:
            # Batches take their numbers in the order of the calls, so that a resumed run gives them the same ids:
            # an answer that overtakes an earlier one waits for it. Threads have no order to keep.
            turn, line = asyncio.Event(), self._asking.setdefault(threading.get_ident(), [])
            line.append(turn)
            try:
                published = await self.client.shards.published()
                if line[0] is not turn:
                    await turn.wait()
            finally:
                line.remove(turn)
                if line:
                    line[0].set()
            self._warnings.served(published)
            policy_version = published.policy_version
        policy_version = integer(policy_version, "policy_version", *UINT64)
        if options.get("exactness") is None:
            options["exactness"] = t.Exactness()
        return t.Batch(
            run_id=self.run_id,
            batch_id=f"step-{step:06d}.v{policy_version}",
            step=step,
            policy_version=policy_version,
            groups=convert.whole_groups(groups),
            sampling=convert.whole_sampling(t.SamplingParams() if sampling is None else sampling),
            run_seed=self._seed,
            tools=None if tools is None else convert.whole_tools(tools),
            **options,  # type: ignore[arg-type]  # no exactness is None
        )

    async def _begin(self, batch: t.Batch, rollout_of: Callable[[GatewayCalls, t.Batch], R]) -> R:
        """Give a batch its number, and submit or open it."""
        # Taken before the first await, because other tasks and threads may begin batches of the step meanwhile.
        with self._numbering:
            free = self._numbers.setdefault(batch.batch_id, [0])
            number = heappop(free)
            if not free:
                free.append(number + 1)
        try:
            rollout = rollout_of(self.client, replace(batch, batch_id=f"{batch.batch_id}.{number}"))
            await rollout.begin()
        except BaseException:
            # The next batch gets it: in a run that is resumed, only batches that begin are counted.
            with self._numbering:
                heappush(free, number)
            raise
        step = batch.step
        self._acknowledge(step)
        self._rollouts.append(rollout)
        self._stats[step] = [*self._stats.pop(step, []), rollout.step_stats]
        while len(self._stats) > _KEPT_STEPS:
            del self._stats[next(iter(self._stats))]
        return rollout

    def _acknowledge(self, before: float) -> None:
        """Acknowledge in the background the rollouts of earlier steps that were read to their ends."""
        done = [each for each in self._rollouts if each.batch.step < before and each.complete]
        for rollout in done:
            rollout.post_ack()
        left = [each for each in self._rollouts if each.batch.step < before and not each.complete]
        # Rollouts that were left in the middle are not kept indefinitely.
        gone = [*done, *left[:-_KEPT_ROLLOUTS]]
        self._rollouts = [each for each in self._rollouts if each not in gone]

    def stats(self, step: int) -> dict[str, float]:
        """Return figures of the samples of a step that were read so far, by name, for an experiment logger.

        Names begin with `rollout/`; docs/sdk.md lists them. The figures of the last 8 steps are kept. ValueError:
        this object has requested no samples of the step.
        """
        if step not in self._stats:
            known = ", ".join(map(str, self._stats)) or "none"
            raise ValueError(
                f"step {step}: this run has requested no samples of it recently; it has figures of {known}"
            )
        return StepStats.joined(self._stats[step]).figures()

    async def hint(
        self,
        step: int,
        groups: Iterable[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int,
        exactness: t.Exactness | None = None,
    ) -> int:
        """Announce the prompts of a coming step; return how many samples may be pre-generated.

        Each shard gets its prompts; if they are too many for one call, the first ones.
        """
        params = convert.whole_sampling(t.SamplingParams() if sampling is None else sampling)
        options = (params, t.Exactness() if exactness is None else exactness, self._seed)
        split = self.client.shards.split(convert.whole_groups(groups))
        parts = {member.name: first_part(own) for member, own in split}

        async def announce(member: OpenShard) -> int:
            hint = t.BatchHint(self.run_id, step, policy_version, parts[member.name], *options)
            return await member.calls.hint(hint)

        shards = self.client.shards
        kept = await shards.all(announce, [each for each in shards.members if each.name in parts])
        self._warnings.announced(int(step))
        return sum(kept)

    async def report_rewards(
        self,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Report the rewards of a batch, and measurements of its update; return how many samples were known."""
        for rollout in self._rollouts:
            if rollout.batch.batch_id == batch_id:
                return await rollout.report_rewards(rewards, kl=kl, clip_fraction=clip_fraction)
        shards, given = self.client.shards, convert.whole_rewards(rewards)

        async def report(member: OpenShard) -> int:
            try:
                return await member.calls.report_rewards(
                    self.run_id, shards.id_of(batch_id), given, kl=kl, clip_fraction=clip_fraction
                )
            except NotFoundError:
                # A small batch may have no part on this shard.
                if shards.alone:
                    raise
                return 0

        return sum(await shards.all(report))
