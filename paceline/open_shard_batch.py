"""The samples that one deployment generates of an open batch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.calls.reading import BatchPlace, BatchReading
from paceline.errors import (
    CancelledError,
    DeadlineExceededError,
    NotFoundError,
    PacelineError,
    UnavailableError,
)
from paceline.shard_batch import Part, ShardBatch
from paceline.split import runs_of

# After these the gateway may have what it was sent.
_UNANSWERED = (UnavailableError, DeadlineExceededError, CancelledError)


class OpenShardBatch(ShardBatch):
    """Part of an open batch, with what was added: where the gateway loses the batch, that is added again."""

    def __init__(self, client: GatewayCalls, batch: t.Batch) -> None:
        self._client = client
        self._groups: list[t.Group] = []
        self._prompts: set[str] = set()
        self._closed = False
        self._place = BatchPlace(batch.run_id, batch.batch_id, open=True)
        # What it reads may be put under another id.
        self._reading = BatchReading(self._place, replace(batch, groups=()), self._open)
        self.parts = [Part(self._reading, self._groups)]

    async def add(self, groups: Sequence[t.Group]) -> int:
        """Add groups; return how many of their samples were not there."""
        added = 0
        for run in runs_of(groups):
            fresh = [group for group in run if group.prompt_id not in self._prompts]
            self._keep(fresh)
            try:
                added += await self._add(run)
            except PacelineError as error:
                if not isinstance(error, _UNANSWERED):
                    self._forget(fresh)
                raise
        return added

    async def close(self) -> int:
        """Let nothing be added any more; return how many samples there are."""
        self._closed = True
        try:
            return await self._client.close_batch(self._place.run_id, self._place.batch_id)
        except NotFoundError:
            await self._open_again()
            return sum(group.samples for group in self._groups)

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many they were; nothing can be added any more."""
        self._closed = True
        return await super().cancel(keep_partial=keep_partial)

    def has(self, prompt_id: str) -> bool:
        """Return True if a group was added here."""
        return prompt_id in self._prompts

    async def go_on(self, continuation: t.Continuation) -> None:
        """Go on with a sample that has called a tool."""
        await self._client.continue_samples(self._place.run_id, self._place.batch_id, [continuation])

    async def events_with_calls(self) -> AsyncGenerator[tuple[Part, t.SampleEvent | t.SampleCall], None]:
        """Iterate over the samples that were not read yet, and over tool calls, of which some come again."""
        (part,) = self.parts
        # Who opened it anew has had all calls.
        stream = self._reading.stream_with_calls(whole=self.known)
        async with aclosing(self._client.events(stream)) as events:
            async for event in events:
                part.read_samples += isinstance(event, t.SampleEvent)
                yield part, event

    async def _add(self, groups: Sequence[t.Group]) -> int:
        try:
            return await self._client.add_samples(self._place.run_id, self._place.batch_id, groups)
        except NotFoundError:
            await self._open_again()
            return sum(group.samples for group in groups)

    async def _open_again(self) -> None:
        """Open the batch, which the gateway has lost, and add all again: the same seeds give the same samples."""
        batch = self._reading.batch
        assert batch is not None, "it was given with the rollout"
        await self._open(batch)

    async def _send(self, batch: t.Batch, queues: bool) -> t.Submitted:
        return await self._open(batch)

    async def _open(self, batch: t.Batch) -> t.Submitted:
        known = await self._client.open_batch(batch)
        # Others may be added meanwhile.
        for run in runs_of(list(self._groups)) if self._groups else ():
            await self._client.add_samples(batch.run_id, batch.batch_id, run)
        if self._closed:
            await self._client.close_batch(batch.run_id, batch.batch_id)
        return t.Submitted(batch.batch_id, sum(group.samples for group in self._groups), known)

    def _keep(self, groups: Sequence[t.Group]) -> None:
        self._groups.extend(groups)
        self._prompts.update(group.prompt_id for group in groups)

    def _forget(self, groups: Sequence[t.Group]) -> None:
        gone = {group.prompt_id for group in groups}
        self._groups[:] = [group for group in self._groups if group.prompt_id not in gone]
        self._prompts -= gone
