"""A batch as a gateway has it, whole or open, and the splitting of batches that are too large for one call.

Usually one `BatchPart` is all of a trainer's batch. A batch on several deployments has one or more on each.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from paceline import convert
from paceline import types as t
from paceline.calls.rollouts import BatchReading, RolloutCalls
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
"""Most samples that a gateway accepts in one batch, unless it is configured for fewer."""
TURN_SECONDS = 2.0
"""Seconds for which one of several parts is read before the next."""
_MAX_BYTES = MAX_MESSAGE_BYTES - (1 << 16)
"""Most bytes of groups in a request: the limit of a message less room for its other fields."""
_TOKEN_BYTES, _GROUP_BYTES = 5, 1100
"""Most bytes of a token, and of the other fields of a group that has no sampling parameters."""
_UNANSWERED = (UnavailableError, DeadlineExceededError, CancelledError)
"""Errors after which the gateway may nevertheless have received the call."""


class BatchPart(BatchReading):
    """A batch as a gateway has it: all of a trainer's batch, or a part of it."""

    batch: t.Batch

    def __init__(self, calls: RolloutCalls, batch: t.Batch) -> None:
        super().__init__(calls, batch.run_id, batch.batch_id, batch=batch)
        self._prompts = {group.prompt_id for group in batch.groups}
        self._given = self._samples_given = 0
        """Cursor of the last sample that the trainer was given, and their number; more may have been read."""
        self.submitted: t.Submitted | None = None
        """The gateway's answer; None until it has room for the batch."""
        self._refused_until = 0.0
        """Time before which the gateway, which was full, wants no other attempt."""

    @property
    def known(self) -> bool:
        """True if the gateway had the batch already when it was submitted."""
        return self.submitted is not None and self.submitted.already_submitted

    @property
    def given(self) -> int:
        """Cursor behind the last sample that was given."""
        # Before the count: another thread may read a sample meanwhile.
        read = self.cursor
        # When the gateway has lost a batch, its cursors begin again.
        return read if self._samples_given == self.taken else min(self._given, read)

    async def submit(self, *, queues: bool = True) -> bool:
        """Submit the batch, if it has not been. Without `queues`, return False if the gateway has no room yet."""
        if self.submitted is not None:
            return True
        if not queues and time.monotonic() < self._refused_until:
            return False
        try:
            self.submitted = await self._submit(self.batch, queues)
        except ResourceExhaustedError as error:
            if queues or error.retry_after is None:
                raise
            self._refused_until = time.monotonic() + error.retry_after
            return False
        return True

    def give(self, event: t.SampleEvent) -> t.Sample:
        """Count a sample as given to the trainer, and return it."""
        self._given, self._samples_given = event.cursor, self._samples_given + 1
        return event.sample

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many there were; they are delivered as ABORTED."""
        # A part that waits for room is submitted, so that its samples are delivered like the others.
        await self.submit()
        return await self.calls.cancel(self.run_id, self.batch_id, keep_partial=keep_partial)

    async def report_rewards(
        self, rewards: Sequence[t.Reward], kl: float | None, clip_fraction: float | None
    ) -> int:
        """Report the rewards of this part's prompts; return how many samples were known."""
        own = [each for each in rewards if each.prompt_id in self._prompts]
        if not own and kl is None and clip_fraction is None:
            return 0
        return await self.calls.report_rewards(
            self.run_id, self.batch_id, own, kl=kl, clip_fraction=clip_fraction
        )

    async def ack(self) -> int:
        """Acknowledge the samples given so far, which are not needed again; return how many were dropped."""
        # A batch that the gateway has lost is not read again from before this cursor.
        self.acked = self.given
        return await self.calls.ack(self.run_id, self.batch_id, self.acked) if self.acked else 0

    def post_ack(self) -> None:
        """Acknowledge in the background."""
        self.acked = self.given
        if self.acked:
            self.calls.post_ack(self.run_id, self.batch_id, self.acked)


class OpenPart(BatchPart):
    """An open batch as a gateway has it, and the groups that were added: if the gateway loses it, it is rebuilt."""

    def __init__(self, calls: RolloutCalls, batch: t.Batch) -> None:
        super().__init__(calls, replace(batch, groups=()))
        self._groups: list[t.Group] = []
        self._closed = False
        self.open = True

    def has(self, prompt_id: str) -> bool:
        """Return True if a group was added here."""
        return prompt_id in self._prompts

    async def add(self, groups: Sequence[t.Group]) -> int:
        """Add groups; return how many of their samples are new."""
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
        """Close the batch, so that nothing can be added; return how many samples it has."""
        self._closed = True
        try:
            return await self.calls.close_batch(self.run_id, self.batch_id)
        except NotFoundError:
            await self._submit(self.batch)
            return sum(group.samples for group in self._groups)

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many there were; nothing can be added any more."""
        self._closed = True
        return await super().cancel(keep_partial=keep_partial)

    async def continue_sample(self, continuation: t.Continuation) -> None:
        """Continue a sample that has called a tool."""
        await self.calls.continue_samples(self.run_id, self.batch_id, [continuation])

    async def events_with_calls(self) -> AsyncGenerator[PartEvent, None]:
        """Iterate over the samples that were not read yet, and over tool calls, some of which are repeated."""
        # A client that has opened the batch as a new one has read all calls.
        self.whole_calls = self.known
        async with aclosing(self.events(self.read_with_calls)) as events:
            async for event in events:
                yield self, event

    async def _add(self, groups: Sequence[t.Group]) -> int:
        try:
            return await self.calls.add_samples(self.run_id, self.batch_id, groups)
        except NotFoundError:
            await self._submit(self.batch)
            return sum(group.samples for group in groups)

    async def _submit(self, batch: t.Batch, queues: bool = True) -> t.Submitted:
        """Open the batch and add its groups. If the gateway has lost it, the same seeds give the same samples."""
        known = await self.calls.open_batch(batch)
        # A copy, because other tasks may add groups meanwhile.
        for run in runs_of(list(self._groups)) if self._groups else ():
            await self.calls.add_samples(batch.run_id, batch.batch_id, run)
        if self._closed:
            await self.calls.close_batch(batch.run_id, batch.batch_id)
        return t.Submitted(batch.batch_id, sum(group.samples for group in self._groups), known)

    def _keep(self, groups: Sequence[t.Group]) -> None:
        self._groups.extend(groups)
        self._prompts.update(group.prompt_id for group in groups)

    def _forget(self, groups: Sequence[t.Group]) -> None:
        gone = {group.prompt_id for group in groups}
        self._groups[:] = [group for group in self._groups if group.prompt_id not in gone]
        self._prompts -= gone


PartEvent = tuple[OpenPart, t.SampleEvent | t.SampleCall]
"""Sample or tool call, and the part of the batch that it is from."""


async def submit_all(parts: Sequence[BatchPart]) -> None:
    """Submit the parts in order, until the gateway has no room for one; `read_in_turn` submits the others."""
    for number, part in enumerate(parts):
        if not await part.submit(queues=number == 0):
            return


async def read_in_turn(parts: Sequence[BatchPart]) -> AsyncGenerator[tuple[BatchPart, t.SampleEvent], None]:
    """Iterate over the samples of all parts that were not read yet. A single part, as usual, is just read."""
    missing = [part for part in parts if not part.whole()]
    while missing:
        for part in list(missing):
            alone = len(missing) == 1
            # While there is a part to read, the others are offered in between; else this one waits for room.
            if not await part.submit(queues=all(each.submitted is None for each in missing)):
                continue
            async with aclosing(part.events(part.read, None if alone else TURN_SECONDS)) as events:
                async for event in events:
                    yield part, event
            if alone or part.whole():
                missing.remove(part)


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
    """Return the first groups, as many as fit into one message."""
    return next(runs_of(groups))


def runs_of(
    groups: Sequence[t.Group], most_samples: int = MAX_SAMPLES, most_bytes: int = _MAX_BYTES
) -> Iterator[Sequence[t.Group]]:
    """Yield runs of consecutive groups that together are within the limits, each as long as possible."""
    # Upper bounds on the bytes of the groups in a request.
    sizes: Iterable[int] = [
        (len(each.prompt_token_ids) + (len(each.sampling.stop_token_ids) if each.sampling else 0))
        * _TOKEN_BYTES
        + _GROUP_BYTES
        for each in groups
    ]
    if sum(sizes) > most_bytes:
        # Exact sizes, with the tag and the length before a group, are seldom needed, and need the groups encoded.
        sizes = (convert.groups_to_proto([each])[0].ByteSize() + 8 for each in groups)
    begin = samples = size = 0
    for end, (group, own) in enumerate(zip(groups, sizes, strict=True)):
        if end > begin and (samples + group.samples > most_samples or size + own > most_bytes):
            yield groups[begin:end]
            begin, samples, size = end, 0, 0
        samples += group.samples
        size += own
    yield groups[begin:]
