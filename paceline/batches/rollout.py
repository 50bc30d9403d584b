"""The samples of a batch as its trainer reads them, with their statistics.

A batch is submitted whole, or open: then groups are added while its samples already run and are read.

    async with run.open_batch(step, SamplingParams(max_tokens=512)) as batch:
        await batch.add(groups)
        async for group in batch.by_group():
            kept += [group] if is_useful(group) else []
            if len(kept) == wanted:
                await batch.cancel()
            elif not is_useful(group):
                await batch.add([next(prompts)])
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from paceline import convert
from paceline import types as t
from paceline.batches.shard_batch import OpenShardBatch, Part, ShardBatch
from paceline.calls import GatewayCalls
from paceline.errors import on_shard
from paceline.shards import OpenShard


@dataclass(slots=True)
class StepStats:
    """Sums over samples, and of each sample what percentiles need: 20 bytes."""

    _lengths: array[int] = field(default_factory=lambda: array("I"))
    """Response tokens of each sample."""
    _queued: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from acceptance to the first token, of samples that have some."""
    _generated: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from there to the end."""
    _counts: dict[str, int] = field(default_factory=dict)
    _versions: set[int] = field(default_factory=set)
    _begin: float = float("inf")
    _end: float = float("-inf")

    def add(self, sample: t.Sample) -> None:
        """Count a sample."""
        provenance = sample.provenance
        self._lengths.append(len(sample.token_ids))
        if provenance.decode_steps:
            self._queued.append(provenance.queue_seconds)
            self._generated.append(provenance.generation_seconds)
        self._versions.update(span.policy_version for span in sample.version_spans)
        for span in provenance.instance_spans:
            self._begin, self._end = min(self._begin, span.begin), max(self._end, span.end)
        self._count("decode_steps", provenance.decode_steps)
        self._count("drafted", provenance.drafted)
        self._count("accepted", provenance.accepted)
        self._count("reused_prefix", provenance.reused_prefix)
        self._count("migrations", provenance.migrations)
        self._count("resubmissions", provenance.resubmissions)
        self._count("version_spans", len(sample.version_spans))
        self._count("mixed_versions", len(sample.version_spans) > 1)
        for status in (t.SampleStatus.TRUNCATED, t.SampleStatus.ABORTED, t.SampleStatus.FAILED):
            self._count(status.value, sample.status is status)

    def _count(self, name: str, more: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + more

    @classmethod
    def joined(cls, parts: Iterable[StepStats]) -> StepStats:
        """Return the sum of several."""
        whole = cls()
        for part in parts:
            whole._lengths += part._lengths
            whole._queued += part._queued
            whole._generated += part._generated
            whole._versions |= part._versions
            whole._begin, whole._end = min(whole._begin, part._begin), max(whole._end, part._end)
            for name, count in part._counts.items():
                whole._count(name, count)
        return whole

    def figures(self) -> dict[str, float]:
        """Return the figures by name, such as `rollout/response_length/p90`.

        A figure that is not known is not there: shares of nothing, or seconds where no sample was generated.
        """
        samples, tokens = len(self._lengths), sum(self._lengths)
        found: dict[str, float] = {"samples": samples, "tokens": tokens}
        if not samples:
            return _named(found)
        found |= _summary("response_length", self._lengths, ("mean", "p50", "p90", "max"))
        counts = self._counts
        for name in ("truncated", "aborted", "failed", "mixed_versions"):
            found[f"{name}_share"] = counts[name] / samples
        for name in ("decode_steps", "drafted", "accepted", "reused_prefix", "migrations", "resubmissions"):
            found[name] = counts[name]
        if tokens:
            found["drafted_per_token"] = counts["drafted"] / tokens
            found["accepted_token_share"] = counts["accepted"] / tokens
        if counts["drafted"]:
            found["accepted_share"] = counts["accepted"] / counts["drafted"]
        if counts["decode_steps"]:
            found["tokens_per_decode_step"] = tokens / counts["decode_steps"]
        if self._versions:
            found["version_spans_per_sample"] = counts["version_spans"] / samples
            found["version_first"], found["version_last"] = min(self._versions), max(self._versions)
        if self._queued:
            found |= _summary("queue_seconds", self._queued, ("mean", "max"))
            found |= _summary("generation_seconds", self._generated, ("mean", "p50", "p90", "max"))
        if self._begin <= self._end:
            found["seconds"] = self._end - self._begin
        return _named(found)


def _named(figures: dict[str, float]) -> dict[str, float]:
    return {f"rollout/{name}": value for name, value in figures.items()}


def _summary(name: str, values: array[int] | array[float], wanted: tuple[str, ...]) -> dict[str, float]:
    measured = np.asarray(values)
    known = {
        "mean": lambda: measured.mean(),
        "p50": lambda: np.percentile(measured, 50),
        "p90": lambda: np.percentile(measured, 90),
        "max": lambda: measured.max(),
    }
    return {f"{name}/{each}": float(known[each]()) for each in wanted}


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


Given = tuple[Part, t.SampleEvent | t.SampleCall]
"""Sample or tool call, and the part of the batch that it is of."""


class AsyncOpenBatch(AsyncRollout):
    """The samples of an open batch. Each is given once, over all iterations together.

    Iterations end when the batch is closed and every sample was given.
    """

    def __init__(
        self,
        client: GatewayCalls,
        batch: t.Batch,
        asked: Callable[[Sequence[t.Group]], None] = lambda groups: None,
    ) -> None:
        """Prepare a batch; `asked` is told of the groups that are added for the first time."""
        self._opened: dict[str, OpenShardBatch] = {}
        self._asked = asked
        super().__init__(client, batch)

    async def add(self, groups: Iterable[t.Group]) -> int:
        """Add groups, and return how many samples they have; those of groups that are there are not counted.

        A prompt id names one group of the batch: the same group again is passed over, so a call that failed may be
        repeated. Waits while the gateway is full.

        FailedPreconditionError: nothing can be added. Reasons: BATCH_CLOSED, after `close` or `cancel`, after the
        deadline, or where the gateway has closed a batch that nobody had to do with; BATCH_STALE, where newer
        versions were published than `max_staleness` allows; VERSION_MISMATCH, for a batch without one.
        ResourceExhaustedError: the batch is as large as it may be; close it and open another.
        """
        given = convert.whole_groups(groups)
        fresh = [group for group in given if group.prompt_id not in self._wanted]
        parts = self._shards.spread(given)

        async def add(member: OpenShard) -> int:
            groups = parts[member.name]
            new = [group for group in groups if group.prompt_id not in self._wanted]
            # Before the call, since another task may read their samples before its answer.
            self._want(groups)
            try:
                return await self._opened[member.name].add(groups)
            except BaseException:
                self._want_not(new)
                raise

        members = [each for each in self._members if each.name in parts]
        added = sum(await self._shards.all(add, members)) if members else 0
        self._asked(fresh)
        return added

    async def close(self) -> int:
        """Let nothing be added any more, so that iterations end; return how many samples the batch has.

        It may be repeated. Leaving `open_batch` without an exception does it, too.
        """
        return sum(await self._shards.all(lambda member: self._opened[member.name].close(), self._members))

    async def go_on(self, continuation: t.Continuation) -> None:
        """Go on with a sample that has called a tool."""
        member = next(each for each in self._members if self._opened[each.name].has(continuation.prompt_id))
        with on_shard(member.name):
            await self._opened[member.name].go_on(continuation)

    def events_with_calls(self, ahead: deque[Given]) -> AsyncGenerator[Given, None]:
        """Return samples and tool calls of all shards, which are read at once; `ahead` has what nobody took yet."""
        if len(self._members) == 1:
            return self._with_calls(self._members[0])
        return self._shards.concurrency.merge([self._with_calls(each) for each in self._members], ahead)

    async def _with_calls(self, member: OpenShard) -> AsyncGenerator[Given, None]:
        with on_shard(member.name):
            async with aclosing(self._opened[member.name].events_with_calls()) as events:
                async for event in events:
                    yield event

    def _divide(self, client: GatewayCalls, batch: t.Batch) -> None:
        for member in self._shards.members:
            own = OpenShardBatch(member.calls, self._own(batch, ()))
            self._batches[member.name] = self._opened[member.name] = own
