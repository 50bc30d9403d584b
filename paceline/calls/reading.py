"""Reading of a batch: each sample once, whatever the gateway forgets meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

from paceline import client_errors, convert, errors
from paceline import types as t
from paceline.transport import Stream
from paceline.v1 import rollout_pb2, sample_pb2

MOST_RENEWALS = 3
"""Submissions of a batch in a row that bring no sample before it counts as lost."""
MOST_AGAIN = 16
"""Ids that are tried for a batch that was acknowledged by trainers before this one."""
MOST_SAMPLES = 64
"""Samples that one answer of a stream may have."""
ACKNOWLEDGED = "CURSOR_ACKNOWLEDGED"
"""Reason of the gateway's refusal to read from before what was acknowledged."""

log = logging.getLogger("paceline")


@dataclass(slots=True)
class BatchPlace:
    """Position in the stream of a batch, and the samples that were read.

    Cursors only ascend: they are not counted with. A sample that comes again, under any cursor, is passed over.
    """

    run_id: str
    batch_id: str
    cursor: int = 0
    total: int | None = None
    """Samples of the batch, as far as it is known."""
    taken: int = 0
    """Samples that were read."""
    asked: int = 0
    """Cursor of the last request."""
    acked: int = 0
    """Cursor that was acknowledged: what is before it does not come again."""
    open: bool = False
    """Samples may still be added, as far as known."""
    _missing: int = 0
    _slots: dict[str, int] = field(default_factory=dict)
    """For each prompt the slots that were read, as bits."""
    _from_start: bool = field(init=False)

    def __post_init__(self) -> None:
        self._from_start = self.cursor == 0

    @property
    def knows_all(self) -> bool:
        """True if every sample that was ever read of the batch was read here."""
        return self._from_start

    def request(self) -> rollout_pb2.StreamRolloutsRequest:
        """Return the request for the events after the last one read."""
        self.asked = self.cursor
        return convert.message(
            rollout_pb2.StreamRolloutsRequest,
            run_id=self.run_id,
            batch_id=self.batch_id,
            cursor=self.cursor,
            most_samples=MOST_SAMPLES,
        )

    def read(self, answer: rollout_pb2.StreamRolloutsResponse) -> Iterator[t.SampleEvent]:
        """Yield the samples that were not read before. The place follows those that were taken."""
        self.total, self.open = answer.total, answer.open
        for each in answer.earlier:
            yield from self._read(answer, each.cursor, each.sample)
        # Events of a later protocol are passed over.
        yield from self._read(answer, answer.cursor, answer.sample if answer.HasField("sample") else None)

    def _read(
        self, answer: rollout_pb2.StreamRolloutsResponse, cursor: int, sample: sample_pb2.Sample | None
    ) -> Iterator[t.SampleEvent]:
        if cursor <= self.cursor:
            return
        self.cursor = cursor
        self._missing = answer.total - answer.finished
        if sample is not None and self._take(sample.prompt_id, sample.slot):
            yield t.SampleEvent(cursor, convert.sample(sample), answer.finished, answer.total)

    def complete(self) -> bool:
        """Return True if no sample is known to be missing."""
        if self.open:
            return False
        return self.taken >= (self.total or 0) if self._from_start else self._missing <= 0

    def whole(self) -> bool:
        """Return True if every sample of the batch was read."""
        known = self.total is not None and not self.open
        return self._from_start and known and self.taken >= (self.total or 0)

    def _take(self, prompt_id: str, slot: int) -> bool:
        """Count a sample; return False if it was read before."""
        before = self._slots.get(prompt_id, 0)
        after = before | 1 << slot
        if after == before:
            return False
        self._slots[prompt_id] = after
        self.taken += 1
        return True


@dataclass(slots=True, eq=False)
class BatchReading:
    """Reads a batch; `batch` is what was submitted, if this client has it, and `submit` submits it again."""

    place: BatchPlace
    batch: t.Batch | None
    submit: Callable[[t.Batch], Awaitable[t.Submitted]]
    _renewals: int = 0
    _taken: int = 0
    _again: int = 0
    _named: str = ""

    def stream(self) -> Stream[t.SampleEvent]:
        """Return the stream from here on."""
        place = self.place
        return Stream(
            "Rollout",
            "StreamRollouts",
            place.request,
            place.read,
            place.complete,
            whole=place.whole,
            begins_at_once=True,
            renew=self.renew,
        )

    def stream_with_calls(self, *, whole: bool) -> Stream[t.SampleEvent | t.SampleCall]:
        """Return the stream from here on with tool calls; `whole` ones have all tokens so far."""

        def request() -> rollout_pb2.StreamRolloutsRequest:
            message = self.place.request()
            message.whole_calls = whole
            return message

        def read(answer: rollout_pb2.StreamRolloutsResponse) -> Iterator[t.SampleEvent | t.SampleCall]:
            yield from self.place.read(answer)
            yield from convert.sample_calls(answer)

        place = self.place
        return Stream(
            "Rollout",
            "StreamRollouts",
            request,
            read,
            place.complete,
            whole=place.whole,
            begins_at_once=True,
            renew=self.renew,
        )

    async def renew(self, failure: errors.PacelineError) -> bool:
        """Submit the batch again, if the gateway has not its samples: the same ones come of the same seeds.

        DataLossError if that is impossible.
        """
        place = self.place
        if place.knows_all and place.cursor > place.acked and _is_behind(failure, place):
            place.cursor = place.acked
            return failure.reason != errors.CUT_SHORT
        if failure.reason == ACKNOWLEDGED and self.batch is not None and place.knows_all:
            return await self._begin_again(self.batch)
        if not isinstance(failure, errors.NotFoundError | errors.DataLossError):
            return False
        if self.batch is None or not place.knows_all:
            if place.cursor == 0 and isinstance(failure, errors.NotFoundError):
                # Perhaps there never was such a batch.
                return False
            raise self._lost(failure)
        self._renewals = 1 if place.taken > self._taken else self._renewals + 1
        self._taken = place.taken
        if self._renewals > MOST_RENEWALS:
            raise self._lost(failure)
        log.warning("batch %s/%s: %s; submitting it again", place.run_id, place.batch_id, failure.message)
        try:
            answer = await self.submit(self.batch)
        except errors.PacelineError as error:
            raise self._lost(error) from error
        if not answer.already_submitted:
            place.acked = 0
        place.cursor = place.acked
        return True

    async def _begin_again(self, batch: t.Batch) -> bool:
        """Submit under another id what a trainer before this one has acknowledged."""
        if self._again == MOST_AGAIN:
            return False
        self._again += 1
        self._named = self._named or batch.batch_id
        self.batch = replace(batch, batch_id=f"{self._named}.again{self._again}")
        await self.submit(self.batch)
        self.place.batch_id, self.place.cursor, self.place.acked = self.batch.batch_id, 0, 0
        return True

    def _lost(self, cause: errors.PacelineError) -> errors.DataLossError:
        place = self.place
        return client_errors.batch_lost(place.run_id, place.batch_id, place.cursor, cause)


def _is_behind(failure: errors.PacelineError, place: BatchPlace) -> bool:
    """Return True if what is missing must lie before the cursor, or the gateway does not know the cursor."""
    if failure.reason == errors.CUT_SHORT:
        return place.cursor == place.asked
    refused = isinstance(failure, errors.InvalidArgumentError)
    return refused and any(violation.field == "cursor" for violation in failure.violations)
