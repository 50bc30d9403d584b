"""The samples of a submitted batch, as its trainer reads them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from paceline import convert
from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import on_shard
from paceline.shard_batch import Part, ShardBatch
from paceline.shards import OpenShard
from paceline.step_stats import StepStats

log = logging.getLogger("paceline")


class AsyncRollout:
    """The samples of a submitted batch. Each is given once, over all iterations together.

    An iteration that was left in the middle is gone on with by the next one. When all samples were given, another
    iteration is a ValueError.
    """

    def __init__(self, client: GatewayCalls, batch: t.Batch) -> None:
        self._shards = client.shards
        self.batch = batch
        self._batches: dict[str, ShardBatch] = {}
        self._divide(client, batch)
        self._members = [member for member in self._shards.members if member.name in self._batches]
        self._ahead: deque[tuple[Part, t.SampleEvent]] = deque()
        """Samples of several shards that were read and not given yet."""
        self._gathered: dict[str, list[t.Sample]] = {}
        """Prompt id -> samples of a group that is not whole yet."""
        self.step_stats = StepStats()
        """Figures of the samples that were given."""
        self._whole: deque[list[t.Sample]] = deque()
        """Whole groups that were not given yet."""
        self._wanted: dict[str, int] = {}
        """Prompt id -> number of samples."""
        self._given_all = False
        """True after an iteration that went to the end."""
        self._failed = 0
        self._want(batch.groups)

    @property
    def submitted(self) -> t.Submitted:
        """The gateway's answer to the batch."""
        known = all(own.known for own in self._batches.values())
        return t.Submitted(self.batch.batch_id, len(self), known)

    @property
    def cursor(self) -> int:
        """Cursor behind the last sample that was given; of a batch in parts or on several shards, of the first."""
        return next(iter(self._batches.values())).parts[0].cursor

    @property
    def complete(self) -> bool:
        """True if every sample was given."""
        return not self._ahead and all(own.whole for own in self._batches.values())

    def stats(self) -> dict[str, float]:
        """Return figures of the samples that were given so far; those of `run.stats`, of this batch alone."""
        return self.step_stats.figures()

    def __len__(self) -> int:
        """Return the number of samples of the batch, so far if it is open."""
        return sum(self._wanted.values())

    async def __aiter__(self) -> AsyncGenerator[t.Sample, None]:
        if self._given_all:
            raise ValueError(
                "all samples of this rollout were given before; keep them, as list(rollout) does"
            )
        async with aclosing(self._events()) as events:
            async for part, event in events:
                sample = part.give(event)
                self.step_stats.add(sample)
                self._note_failure(sample)
                yield sample
        self._given_all = True
        if self._failed:
            log.warning(
                "step %d: %d of %d samples failed; their status is FAILED, and they are not to be trained on",
                self.batch.step,
                self._failed,
                len(self),
            )

    async def by_group(self) -> AsyncIterator[list[t.Sample]]:
        """Iterate over whole groups, each when the last of its samples has ended; a group's samples are by slot.

        Samples of groups that are not whole when the iteration is left are given by the next `by_group`.
        """
        if self._given_all and self._whole:
            while self._whole:
                yield self._whole.popleft()
            return
        async with aclosing(self.__aiter__()) as samples:
            while True:
                while self._whole:
                    yield self._whole.popleft()
                sample = await anext(samples, None)
                if sample is None:
                    break
                self._gathered.setdefault(sample.prompt_id, []).append(sample)
                self._collect(sample.prompt_id)
        # Groups that were added again, by a trainer that was restarted, after the last sample was read.
        while self._whole:
            yield self._whole.popleft()

    def _note_failure(self, sample: t.Sample) -> None:
        if sample.status is not t.SampleStatus.FAILED:
            return
        self._failed += 1
        if self._failed == 1:
            log.warning(
                "step %d: prompt %r slot %d failed: %s",
                self.batch.step,
                sample.prompt_id,
                sample.slot,
                sample.error,
            )

    def _divide(self, client: GatewayCalls, batch: t.Batch) -> None:
        """Give each shard its part of the batch."""
        for member, groups in self._shards.split(batch.groups):
            self._batches[member.name] = ShardBatch(member.calls, self._own(batch, groups))

    def _own(self, batch: t.Batch, groups: Sequence[t.Group]) -> t.Batch:
        return replace(batch, batch_id=self._shards.id_of(batch.batch_id), groups=groups)

    def _want(self, groups: Iterable[t.Group]) -> None:
        """Count groups as part of the batch."""
        for group in groups:
            self._wanted[group.prompt_id] = group.samples
            # Of a trainer that was restarted, samples may come before their group is added again.
            self._collect(group.prompt_id)

    def _want_not(self, groups: Iterable[t.Group]) -> None:
        """Take groups back that the gateway has not accepted."""
        for group in groups:
            self._wanted.pop(group.prompt_id, None)

    def _collect(self, prompt_id: str) -> None:
        """Take out a group that is whole."""
        gathered = self._gathered.get(prompt_id, ())
        if gathered and len(gathered) == self._wanted.get(prompt_id):
            self._whole.append(sorted(self._gathered.pop(prompt_id), key=lambda each: each.slot))

    def _events(self) -> AsyncGenerator[tuple[Part, t.SampleEvent], None]:
        """Return the samples of all shards, which are read at once."""
        if len(self._members) == 1:
            return self._events_of(self._members[0])
        return self._shards.concurrency.merge([self._events_of(each) for each in self._members], self._ahead)

    async def _events_of(self, member: OpenShard) -> AsyncGenerator[tuple[Part, t.SampleEvent], None]:
        with on_shard(member.name):
            async with aclosing(self._batches[member.name].events()) as events:
                async for event in events:
                    yield event

    async def begin(self) -> None:
        """Submit the batch; parts for which the gateway has no room yet follow while the others are read."""
        await self._shards.all(lambda member: self._batches[member.name].begin(), self._members)

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many they were; they are delivered as ABORTED.

        An open batch is closed by this.
        """
        return sum(await self._on_all(lambda own: own.cancel(keep_partial=keep_partial)))

    async def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of the batch, and what its update measured; return how many samples were known."""
        given = convert.whole_rewards(rewards)
        return sum(await self._on_all(lambda own: own.report_rewards(given, kl, clip_fraction)))

    async def ack(self) -> int:
        """Tell the gateway that the samples given so far are not needed again; return how many it dropped.

        Without this it is done for a batch that was read to its end when a later step of the run is submitted,
        and when the run is left without an exception. Until then a restarted trainer can read the batch again.
        """
        return sum(await self._on_all(lambda own: own.ack()))

    def post_ack(self) -> None:
        """Acknowledge in the background."""
        for own in self._batches.values():
            own.post_ack()

    async def _on_all(self, work: Callable[[ShardBatch], Awaitable[int]]) -> list[int]:
        return await self._shards.all(lambda member: work(self._batches[member.name]), self._members)
