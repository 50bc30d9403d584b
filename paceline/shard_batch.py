"""The samples that one deployment generates of a batch: all of them, or a shard's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.calls.reading import BatchPlace, BatchReading
from paceline.errors import ResourceExhaustedError
from paceline.split import parts_of

TURN_SECONDS = 2.0
"""Seconds for which one of several parts is read before the next."""


@dataclass(slots=True, eq=False)
class Part:
    """Batch as the gateway has it: all of the trainer's, or a part of one that is too large for a call."""

    reading: BatchReading
    groups: Sequence[t.Group]
    submitted: t.Submitted | None = None
    """The gateway's answer; None while it had no room."""
    given: int = 0
    """Cursor of the last sample that the trainer was given."""
    read_samples: int = 0
    given_samples: int = 0
    """Samples that were read, perhaps by a thread ahead of the trainer, and of these the ones it was given."""

    @property
    def cursor(self) -> int:
        """Cursor behind the last sample that was given."""
        read = self.reading.place.cursor
        # Cursors of a batch that its gateway had lost begin anew.
        return read if self.given_samples == self.read_samples else min(self.given, read)

    def give(self, event: t.SampleEvent) -> t.Sample:
        """Count a sample as given to the trainer, and return it."""
        self.given, self.given_samples = event.cursor, self.given_samples + 1
        return event.sample


class ShardBatch:
    """The samples that a deployment generates of a batch, in as many parts as the calls need."""

    def __init__(self, client: GatewayCalls, batch: t.Batch) -> None:
        self._client = client
        self.parts = [
            Part(BatchReading(BatchPlace(each.run_id, each.batch_id), each, client.send_batch), each.groups)
            for each in parts_of(batch)
        ]

    @property
    def known(self) -> bool:
        """True if the gateway had the batch already when it was submitted."""
        return all(part.submitted is not None and part.submitted.already_submitted for part in self.parts)

    @property
    def whole(self) -> bool:
        """True if every sample was read."""
        return all(part.reading.place.whole() for part in self.parts)

    async def events(self) -> AsyncGenerator[tuple[Part, t.SampleEvent], None]:
        """Iterate over the samples that were not read yet, each with its part."""
        missing = [part for part in self.parts if not part.reading.place.whole()]
        while missing:
            for part in list(missing):
                alone = len(missing) == 1
                if part.submitted is None and not await self._submit(part, queues=alone):
                    continue
                turn = None if alone else TURN_SECONDS
                async with aclosing(self._client.events(part.reading.stream(), turn)) as events:
                    async for event in events:
                        part.read_samples += 1
                        yield part, event
                if alone or part.reading.place.whole():
                    missing.remove(part)

    async def begin(self) -> None:
        """Submit the batch; parts for which the gateway has no room yet follow while the others are read."""
        await self._submit(self.parts[0], queues=True)
        for part in self.parts[1:]:
            if not await self._submit(part, queues=False):
                return

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many they were; they are delivered as ABORTED."""
        cancelled = 0
        for part in self.parts:
            # A part that waits for room is submitted, so that its samples are delivered like the others.
            await self._submit(part, queues=True)
            place = part.reading.place
            cancelled += await self._client.cancel(place.run_id, place.batch_id, keep_partial=keep_partial)
        return cancelled

    async def report_rewards(
        self, rewards: Sequence[t.Reward], kl: float | None, clip_fraction: float | None
    ) -> int:
        """Report rewards, of which other batches' are passed over; return how many samples were known."""
        matched = 0
        for number, part in enumerate(self.parts):
            prompts = {group.prompt_id for group in part.groups}
            own = [each for each in rewards if each.prompt_id in prompts]
            # One update measured these, so they are reported once.
            measured = (kl, clip_fraction) if number == 0 else (None, None)
            if own or measured != (None, None):
                place = part.reading.place
                matched += await self._client.report_rewards(
                    place.run_id, place.batch_id, own, kl=measured[0], clip_fraction=measured[1]
                )
        return matched

    async def ack(self) -> int:
        """Tell the gateway that the samples given so far are not needed again; return how many it dropped."""
        return sum([await self._client.ack(*cursor) for cursor in self._cursors()])

    def post_ack(self) -> None:
        """Acknowledge in the background."""
        for cursor in self._cursors():
            self._client.post_ack(*cursor)

    def _cursors(self) -> list[tuple[str, str, int]]:
        """Return what to acknowledge, which is not asked for again."""
        for part in self.parts:
            part.reading.place.acked = part.cursor
        places = [part.reading.place for part in self.parts]
        return [(place.run_id, place.batch_id, place.acked) for place in places if place.acked]

    async def _send(self, batch: t.Batch, queues: bool) -> t.Submitted:
        return await self._client.send_batch(batch, queues=queues)

    async def _submit(self, part: Part, queues: bool) -> bool:
        """Submit a part, if it has not been; return False if the gateway has no room for it yet."""
        if part.submitted is not None:
            return True
        try:
            batch = part.reading.batch
            assert batch is not None, "it was given with the rollout"
            part.submitted = await self._send(batch, queues)
        except ResourceExhaustedError as error:
            if queues or error.retry_after is None:
                raise
            return False
        return True
