"""The samples of a batch as its trainer reads them, with their statistics.

A batch is submitted whole (`AsyncRollout`), or opened (`AsyncOpenBatch`) so that groups are added while its samples
are generated and read:

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
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from paceline import convert
from paceline import types as t
from paceline.batches.parts import BatchPart, OpenPart, PartEvent, parts_of, read_in_turn, submit_all
from paceline.calls import GatewayCalls
from paceline.errors import on_shard
from paceline.shards import OpenShard

log = logging.getLogger("paceline")

E = TypeVar("E")


@dataclass(slots=True)
class StepStats:
    """Sums over samples, and 20 bytes of each sample for percentiles."""

    _lengths: array[int] = field(default_factory=lambda: array("I"))
    """Response tokens of each sample."""
    _queued: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from acceptance to the first token, of samples with tokens."""
    _generated: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from the first token to the end."""
    _counts: Counter[str] = field(default_factory=Counter)
    _versions: set[int] = field(default_factory=set)
    _begin: float = float("inf")
    _end: float = float("-inf")

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self._lengths)

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
        self._counts.update(
            decode_steps=provenance.decode_steps,
            drafted=provenance.drafted,
            accepted=provenance.accepted,
            reused_prefix=provenance.reused_prefix,
            migrations=provenance.migrations,
            resubmissions=provenance.resubmissions,
            version_spans=len(sample.version_spans),
            mixed_versions=len(sample.version_spans) > 1,
        )
        self._counts[sample.status.value] += 1

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
            whole._counts.update(part._counts)
        return whole

    def figures(self) -> dict[str, float]:
        """Return the figures by name, such as `rollout/response_length/p90`.

        Unknown figures are left out: shares without samples, or seconds if no sample was generated.
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


class AsyncRollout:
    """The samples of a submitted batch. Each is given once, over all iterations together.

    An iteration that was left in the middle is continued by the next one. When all samples were given, another
    iteration is a ValueError.
    """

    batch: t.Batch
    """The batch as it was submitted."""

    def __init__(
        self, client: GatewayCalls, batch: t.Batch, opened: Mapping[str, OpenPart] | None = None
    ) -> None:
        """Prepare a batch; `opened` has its part on each shard if it is open."""
        self._shards = shards = client.shards
        self.batch = batch
        self._parts: dict[str, Sequence[BatchPart]]
        """Parts of the batch by the name of their shard: one of each, unless the batch is too large for a call."""
        if opened is not None:
            self._parts = {name: [part] for name, part in opened.items()}
        else:
            named = replace(batch, batch_id=shards.id_of(batch.batch_id))
            self._parts = {
                member.name: [
                    BatchPart(member.calls, part) for part in parts_of(replace(named, groups=groups))
                ]
                for member, groups in shards.split(batch.groups)
            }
        self._all_parts = [part for parts in self._parts.values() for part in parts]
        self._members = [member for member in shards.members if member.name in self._parts]
        self._ahead: deque[tuple[BatchPart, t.SampleEvent]] = deque()
        """Samples of several shards that were read and not given yet."""
        self._gathered: dict[str, list[t.Sample]] = {}
        """Prompt id -> samples of a group that is not whole yet."""
        self.step_stats = StepStats()
        """Figures of the samples that were given."""
        self._whole: deque[list[t.Sample]] = deque()
        """Whole groups that were not given yet."""
        self._wanted = {group.prompt_id: group.samples for group in batch.groups}
        """Prompt id -> number of samples."""
        self._given_all = False
        """True after an iteration that reached the end."""
        self._failed = 0

    def __repr__(self) -> str:
        given, of = self.step_stats.samples, f"{self.batch.run_id!r}, step {self.batch.step}"
        return f"<{type(self).__name__} of {of}: {given} of {len(self)} samples were given>"

    @property
    def submitted(self) -> t.Submitted:
        """The gateway's answer to the batch."""
        known = all(part.known for part in self._all_parts)
        return t.Submitted(self.batch.batch_id, len(self), known)

    @property
    def cursor(self) -> int:
        """Cursor behind the last sample that was given; of the first part, if the batch has several."""
        return self._all_parts[0].given

    @property
    def complete(self) -> bool:
        """True if every sample was given."""
        return not self._ahead and all(part.whole() for part in self._all_parts)

    def stats(self) -> dict[str, float]:
        """Return figures of the samples given so far: the same as `run.stats`, for this batch alone."""
        return self.step_stats.figures()

    def __len__(self) -> int:
        """Return the number of samples of the batch, so far if it is open."""
        return sum(self._wanted.values())

    async def __aiter__(self) -> AsyncGenerator[t.Sample, None]:
        if self._given_all:
            raise ValueError(
                "all samples of this rollout were given before; keep them, as list(rollout) does"
            )
        try:
            read = self._on_shards(lambda member: read_in_turn(self._parts[member.name]), self._ahead)
            async with aclosing(read) as events:
                async for part, event in events:
                    sample = part.give(event)
                    self.step_stats.add(sample)
                    if sample.status is t.SampleStatus.FAILED:
                        self._note_failure(sample)
                    yield sample
        except KeyboardInterrupt:
            log.warning(
                "step %d of run %s was interrupted; the fleet continues to generate batch %s. rollout.cancel(), or "
                "client.cancel(%r, %r), ends it",
                *(self.batch.step, self.batch.run_id, self.batch.batch_id),
                *(self.batch.run_id, self.batch.batch_id),
            )
            raise
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
        self._failed += 1
        if self._failed == 1:
            log.warning(
                "step %d: prompt %r slot %d failed: %s",
                self.batch.step,
                sample.prompt_id,
                sample.slot,
                sample.error,
            )

    def _collect(self, prompt_id: str) -> None:
        """Take out a group that is whole."""
        gathered = self._gathered.get(prompt_id, ())
        if gathered and len(gathered) == self._wanted.get(prompt_id):
            self._whole.append(sorted(self._gathered.pop(prompt_id), key=lambda each: each.slot))

    def _on_shards(
        self, read: Callable[[OpenShard], AsyncGenerator[E, None]], ahead: deque[E]
    ) -> AsyncGenerator[E, None]:
        """Return the events of all shards, which are read at once; `ahead` has events that were not taken yet."""
        if self._shards.alone:
            return read(self._members[0])
        streams = [_named_errors(member.name, read(member)) for member in self._members]
        return streams[0] if len(streams) == 1 else self._shards.concurrency.merge(streams, ahead)

    async def begin(self) -> None:
        """Submit the batch; parts for which the gateway has no room yet follow while the others are read."""
        await self._shards.all(lambda member: submit_all(self._parts[member.name]), self._members)

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many there were; they are delivered as ABORTED.

        An open batch is closed by this.
        """
        return await self._sum(lambda part: part.cancel(keep_partial=keep_partial))

    async def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of the batch, and measurements of its update; return how many samples were known."""
        given = convert.whole_rewards(rewards)
        # One update measured these, so each shard gets them once.
        first = [parts[0] for parts in self._parts.values()]
        measured = (kl, clip_fraction)
        return await self._sum(
            lambda part: part.report_rewards(given, *(measured if part in first else (None, None)))
        )

    async def ack(self) -> int:
        """Acknowledge the samples given so far, which are not needed again; return how many were dropped.

        A batch that was read to its end is also acknowledged when a later step of the run is submitted, and when
        the run is left without an exception. Until then a restarted trainer can read the batch again.
        """
        return await self._sum(lambda part: part.ack())

    def post_ack(self) -> None:
        """Acknowledge in the background."""
        for part in self._all_parts:
            part.post_ack()

    async def _sum(self, work: Callable[[BatchPart], Awaitable[int]]) -> int:
        """Return the sum of `work` over all parts: on all shards at once, a shard's parts one after the other."""

        async def on_parts(member: OpenShard) -> int:
            return sum([await work(part) for part in self._parts[member.name]])

        return sum(await self._shards.all(on_parts, self._members))


async def _named_errors(shard: str, stream: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    """Iterate over a stream, whose errors get the name of the shard."""
    with on_shard(shard):
        async with aclosing(stream) as events:
            async for event in events:
                yield event


class AsyncOpenBatch(AsyncRollout):
    """The samples of an open batch. Each is given once, over all iterations together.

    Iterations end when the batch is closed and every sample was given.
    """

    def __init__(
        self,
        client: GatewayCalls,
        batch: t.Batch,
        added: Callable[[Sequence[t.Group]], None] = lambda groups: None,
    ) -> None:
        """Prepare a batch; `added` is called with the groups that are added for the first time."""
        shards = client.shards
        named = replace(batch, batch_id=shards.id_of(batch.batch_id))
        self._opened = {member.name: OpenPart(member.calls, named) for member in shards.members}
        self._added = added
        super().__init__(client, batch, self._opened)

    async def add(self, groups: Iterable[t.Group]) -> int:
        """Add groups, and return how many samples they have; samples of groups added before do not count.

        A prompt id names one group of the batch: the same group again is skipped, so a call that failed may be
        repeated. After an error, groups that the gateway may have count as added. Waits while the gateway is full.

        FailedPreconditionError: nothing can be added. Reasons: BATCH_CLOSED, after `close` or `cancel`, after the
        deadline, or where the gateway has closed a batch that no client used; BATCH_STALE, where newer
        versions were published than `max_staleness` allows; VERSION_MISMATCH, for a batch without one.
        ResourceExhaustedError: the batch is as large as it may be; close it and open another.
        """
        given = convert.whole_groups(groups)
        fresh = [group for group in given if group.prompt_id not in self._wanted]
        parts = self._shards.spread(given)

        async def add(member: OpenShard) -> int:
            groups, part = parts[member.name], self._opened[member.name]
            # Counted before the call, because another task may read their samples before it returns.
            self._want(groups)
            try:
                return await part.add(groups)
            except BaseException:
                # The part has what the gateway accepted before, and what it may have received without an answer.
                for group in groups:
                    if not part.has(group.prompt_id):
                        self._wanted.pop(group.prompt_id, None)
                raise

        members = [each for each in self._members if each.name in parts]
        try:
            return sum(await self._shards.all(add, members)) if members else 0
        finally:
            self._added([group for group in fresh if group.prompt_id in self._wanted])

    async def close(self) -> int:
        """Close the batch, so that iterations end; return how many samples it has.

        May be repeated. Leaving `open_batch` without an exception also closes the batch.
        """
        return sum(await self._shards.all(lambda member: self._opened[member.name].close(), self._members))

    async def continue_sample(self, continuation: t.Continuation) -> None:
        """Continue a sample that has called a tool."""
        member = next(each for each in self._members if self._opened[each.name].has(continuation.prompt_id))
        with on_shard(member.name):
            await self._opened[member.name].continue_sample(continuation)

    def _want(self, groups: Iterable[t.Group]) -> None:
        """Count groups as part of the batch."""
        for group in groups:
            self._wanted[group.prompt_id] = group.samples
            # After a restart of the trainer, samples may come before their group is added again.
            self._collect(group.prompt_id)

    def events_with_calls(self, ahead: deque[PartEvent]) -> AsyncGenerator[PartEvent, None]:
        """Return samples and tool calls, each with its part; `ahead` has events that were not taken yet."""
        return self._on_shards(lambda member: self._opened[member.name].events_with_calls(), ahead)
