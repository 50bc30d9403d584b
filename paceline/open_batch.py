"""A batch to which groups are added while its samples already run and are read.

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

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from paceline import convert
from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import on_shard
from paceline.open_shard_batch import OpenShardBatch
from paceline.rollout import AsyncRollout
from paceline.shard_batch import Part
from paceline.shards import OpenShard

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
