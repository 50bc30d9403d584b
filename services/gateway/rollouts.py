"""Submitting, following, cancelling and generating: what RolloutService does, without gRPC."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import structlog

from paceline.v1 import rollout_pb2, sample_pb2
from services.gateway.admission import check_generate, check_names, check_submit
from services.gateway.assemble import batch_of, final_sample, single
from services.gateway.batch import Batch, BatchKey
from services.gateway.bubbles import BubbleLink
from services.gateway.config import GatewayConfig
from services.gateway.dispatcher import Dispatcher
from services.gateway.fleet import Fleet
from services.gateway.hinting import Hinting
from services.gateway.hints import as_submission
from services.gateway.journal import Journal, Known, Recovered, fingerprint
from services.gateway.lenience import Leniences
from services.gateway.running import Running
from services.gateway.update import UpdateBook
from services.platform.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from services.platform.sampling import ModelLimits
from services.platform.seeds import sample_seed
from services.platform.violations import Violation

log = structlog.get_logger(__name__)

# Levels whose tokens depend on drafts or on what is cached.
_DRAFTED = (sample_pb2.EXACTNESS_LEVEL_LENIENT, sample_pb2.EXACTNESS_LEVEL_REJECTION)
# Events read from the journal at a time.
_CHUNK = 16


class Rollouts:
    """The rollouts of all runs, for one term of leadership."""

    def __init__(
        self,
        config: GatewayConfig,
        journal: Journal,
        dispatcher: Dispatcher,
        fleet: Fleet,
        book: UpdateBook,
        leniences: Leniences,
        hinting: Hinting,
        bubbles: BubbleLink,
    ) -> None:
        self._config = config
        self._journal = journal
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._book = book
        self._leniences = leniences
        self._hinting = hinting
        self._bubbles = bubbles
        # Weak: a lock lives as long as somebody holds it or waits for it.
        self._locks: WeakValueDictionary[BatchKey, asyncio.Lock] = WeakValueDictionary()
        self._numbers = itertools.count(1)

    async def recover(self) -> None:
        """Goes on with every batch that a former gateway left unfinished."""
        for key in await self._journal.unfinished():
            await self._resume(key)

    async def submit(self, request: rollout_pb2.SubmitRolloutsRequest) -> rollout_pb2.SubmitRolloutsResponse:
        """Accepts a batch; answers the same request again as the first time, whatever happened since."""
        key = (request.run_id, request.batch_id)
        if violations := check_names(*key):
            raise InvalidArgument(violations)
        async with self._locks.setdefault(key, asyncio.Lock()):
            known = await self._known(request)
            if known is not None:
                return known
            self._check_version(request.policy_version)
            if violations := check_submit(request, self._limits()):
                raise InvalidArgument(violations)
            total = sum(group.samples for group in request.groups)
            with self._reserve(total):
                accepted_at = time.time()
                lenience = await self._leniences.choose(request.run_id, request.exactness)
                coverage = await self._bubbles.coverage(request.run_id, request.step)
                recorded = await self._journal.create(request, accepted_at, lenience)
                _check_same(request, recorded)
                batch = self._batch(request, accepted_at, recorded.lenience)
            self._hinting.begin(batch)
            self._dispatcher.add(batch, fingerprint=fingerprint(request), coverage=coverage)
        log.info("batch_accepted", batch=key, samples=total, version=request.policy_version)
        return rollout_pb2.SubmitRolloutsResponse(batch_id=request.batch_id, samples=total)

    async def hint(self, request: rollout_pb2.HintNextBatchRequest) -> int:
        """Takes in what a coming step will ask for, checked as that will be; returns how many samples may be
        pre-generated. 0, and no error, when the step has begun, is too far ahead, or there is no room."""
        announced = as_submission(request)
        if violations := check_names(announced.run_id, announced.batch_id):
            raise InvalidArgument(violations)
        if violations := check_submit(announced, self._limits()):
            raise InvalidArgument(violations)
        return await self._hinting.hint(request)

    async def follow(self, key: BatchKey, cursor: int) -> AsyncIterator[rollout_pb2.StreamRolloutsResponse]:
        """The finished samples after `cursor`, as they come, until all have been sent."""
        head = await self._journal.head(key)
        if head is None:
            raise NotFound("batch", "/".join(key))
        if cursor > head.total:
            allowed = f"the batch has {head.total} samples, so cursors go from 0 to {head.total}"
            raise InvalidArgument([Violation("cursor", f"is {cursor}; {allowed}")])
        if cursor > head.events:
            allowed = f"the last event so far has cursor {head.events}"
            raise InvalidArgument([Violation("cursor", f"is {cursor}; {allowed}")])
        if head.events < head.total:
            await self._take_up(key)
        while cursor < head.total:
            for payload in await self._journal.events(key, cursor, _CHUNK):
                cursor += 1
                yield rollout_pb2.StreamRolloutsResponse(
                    cursor=cursor,
                    sample=sample_pb2.Sample.FromString(payload),
                    finished=max(cursor, self._events(key, head.events)),
                    total=head.total,
                )
            await self._await_event(key, cursor, head.total)

    async def cancel(self, request: rollout_pb2.CancelRolloutsRequest) -> int:
        """Ends samples of a batch; returns how many were not finished or cancelled before."""
        key = (request.run_id, request.batch_id)
        head = await self._journal.head(key)
        if head is None:
            raise NotFound("batch", "/".join(key))
        running = self._dispatcher.batches.get(key)
        if running is None:
            return 0
        indexes = _indexes(running, request.samples)
        await self._journal.cancel(request)
        if self._dispatcher.batches.get(key) is not running:
            return 0
        cancelled = self._dispatcher.cancel(running, indexes, request.keep_partial)
        log.info("cancelled", batch=key, samples=cancelled, keep_partial=request.keep_partial)
        return cancelled

    async def generate(
        self, request: rollout_pb2.GenerateRequest
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """One sample: deltas, then the whole. Ends the sample on its instance when the caller goes."""
        version = request.policy_version if request.HasField("policy_version") else self._book.version or 0
        self._check_version(version)
        if violations := check_generate(request, self._limits()):
            raise InvalidArgument(violations)
        with self._reserve(1):
            lenience = await self._leniences.choose(request.run_id, request.exactness)
            batch = single(
                request,
                ("", f"generate-{next(self._numbers)}"),
                version,
                accepted_at=time.time(),
                max_seconds=self._config.max_batch_seconds,
                max_attempts=self._config.max_attempts,
                seed_of=_seed,
                lenience=lenience,
            )
        running = self._dispatcher.add(batch, private=True)
        try:
            async for response in _deltas(running):
                yield response
        finally:
            self._dispatcher.drop(running)
        yield rollout_pb2.GenerateResponse(sample=final_sample(batch, batch.endings[0]))

    # What may be asked ---------------------------------------------------------------------------------

    async def _known(
        self, request: rollout_pb2.SubmitRolloutsRequest
    ) -> rollout_pb2.SubmitRolloutsResponse | None:
        key = (request.run_id, request.batch_id)
        known = await self._journal.known(key)
        if known is None:
            return None
        _check_same(request, known)
        if key not in self._dispatcher.batches:
            # A former call may have recorded the batch and then broken off.
            await self._resume(key)
        return rollout_pb2.SubmitRolloutsResponse(
            batch_id=request.batch_id, samples=known.total, already_submitted=True
        )

    def _check_version(self, version: int) -> None:
        if self._book.is_applying():
            raise FailedPrecondition(
                "UPDATE_APPLYING", "a weight update is being applied; come again after it"
            )
        current = self._book.version
        if current is None or not self._fleet.usable():
            raise Unavailable("no instance is serving", retry_after=2.0)
        if version != current:
            raise FailedPrecondition(
                "VERSION_MISMATCH",
                f"policy version {version} was asked for; the fleet has version {current}",
                current=str(current),
                requested=str(version),
            )

    def _limits(self) -> ModelLimits:
        records = [member.record for member in self._fleet.usable()]
        if not records:
            raise Unavailable("no instance is serving", retry_after=2.0)
        return ModelLimits(
            vocab_size=min(record.vocab_size for record in records),
            max_model_len=min(record.max_model_len for record in records),
        )

    @contextmanager
    def _reserve(self, samples: int) -> Iterator[None]:
        """Counts samples as unfinished until they are handed to the dispatcher, so that neither the bound
        of the queue nor a weight update overlooks those that are just being recorded."""
        most, now = self._config.max_queued_samples, self._dispatcher.unfinished
        if now + samples > most:
            raise ResourceExhausted(
                "queued_samples",
                f"{samples} more samples on top of {now} unfinished ones would exceed {most}",
                retry_after=None if samples > most else 5.0,
            )
        self._dispatcher.unfinished += samples
        try:
            yield
        finally:
            self._dispatcher.unfinished -= samples

    # Batches -------------------------------------------------------------------------------------------

    def _batch(
        self, request: rollout_pb2.SubmitRolloutsRequest, accepted_at: float, lenience: float | None
    ) -> Batch:
        return batch_of(
            request,
            accepted_at=accepted_at,
            max_seconds=self._config.max_batch_seconds,
            max_attempts=self._config.max_attempts,
            seed_of=_seed,
            lenience=lenience,
        )

    async def _take_up(self, key: BatchKey) -> None:
        """Works on a batch that is recorded and that nobody works on: its submission may have been cut off
        between the record and the work."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._dispatcher.batches:
                await self._resume(key)

    async def _resume(self, key: BatchKey) -> None:
        recovered = await self._journal.adopt(key)
        if recovered is None or len(recovered.done) >= recovered.total:
            await self._journal.unlist(key)
            return
        batch = self._batch(recovered.request, recovered.accepted_at, recovered.lenience)
        running = Running(batch, 0)
        _restore(running, recovered)
        self._hinting.resume(batch)
        self._dispatcher.add(batch, fingerprint=fingerprint(recovered.request), events=len(recovered.done))
        log.info(
            "batch_resumed",
            batch=key,
            finished=len(recovered.done),
            partial=len(recovered.partials),
            total=recovered.total,
        )

    def _events(self, key: BatchKey, least: int) -> int:
        running = self._dispatcher.batches.get(key)
        return least if running is None else max(least, running.events)

    async def _await_event(self, key: BatchKey, cursor: int, total: int) -> None:
        """Returns when there may be events after `cursor`."""
        running = self._dispatcher.batches.get(key)
        while running is not None and running.events <= cursor < total:
            await running.changed.wait()
            if running.broken:
                raise DataLoss(f"the journal has lost batch {'/'.join(key)}: {running.broken}")
            running = self._dispatcher.batches.get(key)
        if running is None and cursor < total:
            head = await self._journal.head(key)
            if head is None or head.events <= cursor:
                raise Unavailable(f"batch {'/'.join(key)} is not being worked on here; come again")


def _check_same(request: rollout_pb2.SubmitRolloutsRequest, known: Known) -> None:
    if known.fingerprint != fingerprint(request):
        name = f"{request.run_id}/{request.batch_id}"
        raise AlreadyExists("batch", name, f"batch {name} was submitted before with another content")


def _restore(running: Running, recovered: Recovered) -> None:
    batch = running.batch
    for index in recovered.done:
        batch.mark_ended(index)
    for partial in recovered.partials:
        batch.restore(partial.index, partial.tokens, partial.logprobs)
    for cancel in recovered.cancels:
        for index in _indexes(running, cancel.samples):
            batch.cancel(index, cancel.keep_partial)


def _indexes(running: Running, keys: Iterable[sample_pb2.Sample | rollout_pb2.SampleKey]) -> list[int]:
    batch = running.batch
    wanted = list(keys)
    if not wanted:
        return [sample.index for sample in batch.samples]
    by_key = {(batch.groups[s.group].prompt_id, s.slot): s.index for s in batch.samples}
    unknown = [
        Violation(f"samples[{number}]", f"prompt {key.prompt_id!r} slot {key.slot} is not in the batch")
        for number, key in enumerate(wanted)
        if (key.prompt_id, key.slot) not in by_key
    ]
    if unknown:
        raise InvalidArgument(unknown)
    return [by_key[key.prompt_id, key.slot] for key in wanted]


async def _deltas(running: Running) -> AsyncIterator[rollout_pb2.GenerateResponse]:
    batch, sample, sent = running.batch, running.batch.samples[0], 0
    while True:
        settled = len(sample.tokens)
        if batch.exactness.level in _DRAFTED and not batch.is_done():
            # The last token would be sampled again elsewhere, and could then be another one.
            settled -= 1
        if settled > sent:
            delta = rollout_pb2.TokenDelta(
                token_ids=sample.tokens[sent:settled], logprobs=sample.logprobs[sent:settled]
            )
            # Counted before the yield: the sample grows while the caller is being sent this.
            sent = settled
            yield rollout_pb2.GenerateResponse(delta=delta)
        elif batch.is_done():
            return
        elif running.dropped:
            raise Unavailable("this gateway no longer leads; go on from the tokens so far")
        else:
            await running.changed.wait()


def _seed(run_seed: int, step: int, prompt_id: str, slot: int, coupled_history: bool) -> int:
    return sample_seed(run_seed, step, prompt_id, slot, coupled_history=coupled_history)
