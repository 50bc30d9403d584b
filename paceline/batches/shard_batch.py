"""The part of a batch that one deployment generates, submitted whole or open.

A batch that is too large for one call is split, and its parts are read in turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from paceline import convert
from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.calls.rollouts import BatchPlace, BatchReading
from paceline.errors import (
    CancelledError,
    DeadlineExceededError,
    NotFoundError,
    PacelineError,
    ResourceExhaustedError,
    UnavailableError,
)
from paceline.transport.channel import MAX_MESSAGE_BYTES

MAX_SAMPLES = 65_536
"""Most samples that a gateway accepts in one batch, unless it is set up for fewer."""
# Below the limit by what the fields beside the groups may take.
_MAX_BYTES = MAX_MESSAGE_BYTES - (1 << 16)
# The most that a token takes, and the other fields of a group without sampling parameters of its own.
_TOKEN_BYTES, _GROUP_BYTES = 5, 1100


def parts_of(batch: t.Batch, most_samples: int = MAX_SAMPLES, most_bytes: int = _MAX_BYTES) -> list[t.Batch]:
    """Return the batch, or batches that have its groups in order, with ids derived from its own.

    The same batch always has the same parts. Seeds depend on prompt and slot only, so a group is never split.
    """
    runs = list(runs_of(batch.groups, most_samples, most_bytes))
    if len(runs) == 1:
        return [batch]
    ids = [f"{batch.batch_id}.part{number}of{len(runs)}" for number in range(1, len(runs) + 1)]
    return [replace(batch, batch_id=name, groups=run) for name, run in zip(ids, runs, strict=True)]


def first_part(groups: Sequence[t.Group]) -> Sequence[t.Group]:
    """Return as many groups as fit into one message."""
    return next(runs_of(groups))


def runs_of(
    groups: Sequence[t.Group], most_samples: int = MAX_SAMPLES, most_bytes: int = _MAX_BYTES
) -> Iterator[Sequence[t.Group]]:
    """Yield consecutive groups that together are within the limits, as many as possible each time."""
    # Sizes are seldom needed, and to know them is to encode the groups.
    size_of = _least_effort if sum(map(_least_effort, groups)) <= most_bytes else _encoded
    begin = samples = size = 0
    for end, group in enumerate(groups):
        own = size_of(group)
        if end > begin and (samples + group.samples > most_samples or size + own > most_bytes):
            yield groups[begin:end]
            begin, samples, size = end, 0, 0
        samples += group.samples
        size += own
    yield groups[begin:]


def _least_effort(group: t.Group) -> int:
    """Return at least the bytes of a group in a request."""
    tokens = len(group.prompt_token_ids) + (len(group.sampling.stop_token_ids) if group.sampling else 0)
    return tokens * _TOKEN_BYTES + _GROUP_BYTES


def _encoded(group: t.Group) -> int:
    """Return the bytes of a group in a request, with the tag and the length before it."""
    return convert.group_to_proto(group).ByteSize() + 8


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
