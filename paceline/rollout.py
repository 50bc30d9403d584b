"""The samples of a submitted batch, as its trainer reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
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


class AsyncRollout:
    """The samples of a submitted batch. Each is given once, over all iterations together."""

    def __init__(self, client: GatewayCalls, batch: t.Batch) -> None:
        self._client = client
        self.batch = batch
        self._parts = [
            Part(BatchReading(BatchPlace(each.run_id, each.batch_id), each, client.send_batch), each.groups)
            for each in parts_of(batch)
        ]

    @property
    def submitted(self) -> t.Submitted:
        """The gateway's answer to the batch."""
        known = all(part.submitted is not None and part.submitted.already_submitted for part in self._parts)
        return t.Submitted(self.batch.batch_id, len(self), known)

    @property
    def cursor(self) -> int:
        """Cursor behind the last sample that was given; of a batch in parts, of the first part."""
        return self._parts[0].reading.place.cursor

    @property
    def complete(self) -> bool:
        """True if every sample was given."""
        return all(part.reading.place.whole() for part in self._parts)

    def __len__(self) -> int:
        """Return the number of samples of the batch."""
        return sum(group.samples for group in self.batch.groups)

    async def __aiter__(self) -> AsyncIterator[t.Sample]:
        missing = [part for part in self._parts if not part.reading.place.whole()]
        while missing:
            for part in list(missing):
                alone = len(missing) == 1
                if part.submitted is None and not await self._submit(part, queues=alone):
                    continue
                turn = None if alone else TURN_SECONDS
                async with aclosing(self._client.events(part.reading.stream(), turn)) as events:
                    async for event in events:
                        yield event.sample
                if alone or part.reading.place.whole():
                    missing.remove(part)

    async def begin(self) -> None:
        """Submit the batch; parts for which the gateway has no room yet follow while the others are read."""
        await self._submit(self._parts[0], queues=True)
        for part in self._parts[1:]:
            if not await self._submit(part, queues=False):
                return

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many they were; they are delivered as ABORTED."""
        cancelled = 0
        for part in self._parts:
            # A part that waits for room is submitted, so that its samples are delivered like the others.
            await self._submit(part, queues=True)
            place = part.reading.place
            cancelled += await self._client.cancel(place.run_id, place.batch_id, keep_partial=keep_partial)
        return cancelled

    async def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of the batch, and what its update measured; return how many samples were known."""
        given = list(rewards)
        matched = 0
        for number, part in enumerate(self._parts):
            prompts = {group.prompt_id for group in part.groups} if len(self._parts) > 1 else None
            own = [each for each in given if prompts is None or each.prompt_id in prompts]
            # One update measured these, so they are reported once.
            measured = (kl, clip_fraction) if number == 0 else (None, None)
            if own or measured != (None, None):
                place = part.reading.place
                matched += await self._client.report_rewards(
                    place.run_id, place.batch_id, own, kl=measured[0], clip_fraction=measured[1]
                )
        return matched

    async def ack(self) -> int:
        """Tell the gateway that the samples given so far are not needed again; return how many it dropped.

        Without this it is done for a batch that was read to its end when a later step of the run is submitted,
        and when the run is left without an exception. Until then a restarted trainer can read the batch again.
        """
        return sum([await self._client.ack(*cursor) for cursor in self._cursors()])

    def post_ack(self) -> None:
        """Acknowledge in the background."""
        for cursor in self._cursors():
            self._client.post_ack(*cursor)

    def _cursors(self) -> list[tuple[str, str, int]]:
        """Return what to acknowledge, which is not asked for again."""
        places = [part.reading.place for part in self._parts]
        for place in places:
            place.acked = place.cursor
        return [(place.run_id, place.batch_id, place.cursor) for place in places if place.cursor]

    async def _submit(self, part: Part, queues: bool) -> bool:
        """Submit a part, if it has not been; return False if the gateway has no room for it yet."""
        if part.submitted is not None:
            return True
        try:
            batch = part.reading.batch
            assert batch is not None, "it was given with the rollout"
            part.submitted = await self._client.send_batch(batch, queues=queues)
        except ResourceExhaustedError as error:
            if queues or error.retry_after is None:
                raise
            return False
        return True
