"""Submission, hinting and cancellation of batches."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import ParamSpec, TypeVar

import structlog

from paceline.errors import Violation
from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import AlreadyExists, InvalidArgument, Unavailable
from services.gateway.batches.admission import ENOUGH, as_submission, check_names, check_submit
from services.gateway.batches.difference import first_difference
from services.gateway.hints.book import hinted_batch
from services.gateway.hints.bubble_link import BubbleLink
from services.gateway.hints.hinting import Hinting
from services.gateway.journal.batch_record import BatchHead, BatchRecord
from services.gateway.journal.journal import cancelled_indexes
from services.gateway.journal.recorded_request import serialised
from services.gateway.journal.replies import BatchGone
from services.gateway.rollouts.intake import RolloutIntake
from services.gateway.rollouts.open_batches import OpenBatches
from services.gateway.rollouts.recovery import BatchRecovery
from services.platform.collection import pause_collection

log = structlog.get_logger(__name__)

OPENED = "open:"
"""Prefix of the fingerprints of batches that were opened."""
R = TypeVar("R")
P = ParamSpec("P")
# Samples and bytes of a request that is worked through at once, in under 2 ms; a larger one is in a thread.
_FEW_SAMPLES, _FEW_BYTES = 256, 64 << 10


@dataclass(eq=False)
class Submissions:
    """Batches of all runs, for one term of leadership."""

    intake: RolloutIntake
    recovery: BatchRecovery
    hinting: Hinting
    bubbles: BubbleLink
    open_batches: OpenBatches

    async def submit(self, request: pb.SubmitRolloutsRequest) -> pb.SubmitRolloutsResponse:
        """Accept a batch. The same request again gets the same answer, whatever happened since."""
        record, known = await self._accept(request)
        return pb.SubmitRolloutsResponse(
            batch_id=request.batch_id, samples=record.total, already_submitted=known
        )

    async def open(self, request: pb.OpenBatchRequest) -> pb.OpenBatchResponse:
        """Open a batch. The same request again gets the same answer, whatever happened since."""
        _, known = await self._accept(as_submission(request), opens=True)
        return pb.OpenBatchResponse(batch_id=request.batch_id, already_opened=known)

    async def _accept(
        self, request: pb.SubmitRolloutsRequest, *, opens: bool = False
    ) -> tuple[BatchRecord, bool]:
        """Return the record of a batch, and True if it was known."""
        key = (request.run_id, request.batch_id)
        if violations := check_names(*key):
            raise InvalidArgument(violations)
        payload, fingerprint = await serialised(request)
        if opens:
            fingerprint = f"{OPENED}{fingerprint}"
        async with self.recovery.lock(key):
            known = await self.recovery.take_up(key)
            if known is not None and not known.is_acknowledged:
                await _check_same(known, request, fingerprint)
                self.intake.batches.use(key)
                return known, True
            total = sum(group.samples for group in request.groups)
            small = total <= _FEW_SAMPLES and len(payload) <= _FEW_BYTES
            await self._check(request, small=small, opens=opens)
            account, most_tokens = self.intake.account(), 0
            if account is not None:
                most_tokens = await _walk(small, account.tokens_of, request.groups, request.sampling)
            with self.intake.batches.reserve(total, account, most_tokens):
                pause_collection(self.intake.batches.unfinished)
                accepted_at = time.time()
                lenience = await self.intake.leniences.choose(request.run_id, request.exactness)
                head = BatchHead(fingerprint, accepted_at, total, lenience, opens, account)
                record = await _walk(small, BatchRecord, request, head, self.intake.journal.term)
                if known is not None:
                    # Its trainer has had all of it, and wants it again: it was restarted.
                    record.follow(known)
                    await self.intake.journal.discard(key)
                    self.intake.records.forget(key)
                coverage, created = await asyncio.gather(
                    self.bubbles.coverage(request.run_id, request.step),
                    self.intake.journal.create(record, payload),
                )
                if not created:
                    raise Unavailable(f"batch {'/'.join(key)} was recorded by another gateway; come again")
                batch = await _walk(
                    small,
                    self.intake.builder.from_submission,
                    request,
                    accepted_at,
                    lenience,
                    opened=opens,
                    account=account,
                )
            self.intake.records.add(record)
            self.hinting.begin(batch)
            self.intake.begin(batch, coverage=coverage)
        log.info("batch_accepted", batch=key, samples=total, version=request.policy_version, open=opens)
        return record, False

    async def _check(self, request: pb.SubmitRolloutsRequest, *, small: bool, opens: bool) -> None:
        """Raise a ServiceError if a new batch is malformed, or has no room now."""
        self.intake.check_request(request)
        limits, most_calls = self.intake.limits(), self.intake.builder.max_calls
        if violations := await _walk(
            small, check_submit, request, limits, opens=opens, most_calls=most_calls
        ):
            raise InvalidArgument(violations)
        # Another version may have been published since.
        self.intake.check_request(request)
        self.intake.headroom.check()
        if opens:
            self.intake.batches.check_batches()

    async def hint(self, request: pb.HintNextBatchRequest) -> int:
        """Keep a hint, checked like the batch that it announces; return how many samples may be pre-generated.

        0, and no error, if the step has begun, is too far ahead, or there is no room.
        """
        announced = await asyncio.to_thread(hinted_batch, request)
        if violations := check_names(announced.run_id, announced.batch_id):
            raise InvalidArgument(violations)
        if violations := await asyncio.to_thread(check_submit, announced, self.intake.limits()):
            raise InvalidArgument(violations)
        return await self.hinting.hint(request)

    async def cancel(self, request: pb.CancelRolloutsRequest) -> int:
        """End samples of a batch; return how many were not finished or cancelled before.

        Where none is named, an open batch is closed: a record of that cancels what is added later, too.
        """
        key = (request.run_id, request.batch_id)
        record = await self.recovery.known(key)
        _check_samples(record, request)
        if record.open and not request.samples:
            await self.open_batches.close(key)
        running = self.intake.batches.by_key.get(key)
        if running is None:
            return 0
        record.cancels.append(request)
        # One that is gone is recorded anew, with its cancellations, by its next write.
        with contextlib.suppress(BatchGone):
            await self.intake.journal.cancel(request)
        if self.intake.batches.by_key.get(key) is not running:
            return 0
        indexes = cancelled_indexes(record, request.samples)
        cancelled = await self.intake.dispatcher.cancel(running, indexes, request.keep_partial)
        log.info("cancelled", batch=key, samples=cancelled, keep_partial=request.keep_partial)
        return cancelled


async def _walk(small: bool, function: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
    """Return what a function finds that walks over a request. A large one is walked over in a thread."""
    return function(*given, **named) if small else await asyncio.to_thread(function, *given, **named)


async def _check_same(known: BatchRecord, request: pb.SubmitRolloutsRequest, fingerprint: str) -> None:
    """Raise AlreadyExists, which names the first field that differs, for another batch of the same name."""
    if known.head.fingerprint == fingerprint:
        return
    name, was_opened = "/".join(known.key), known.head.fingerprint.startswith(OPENED)
    if was_opened != fingerprint.startswith(OPENED):
        differs, how = "", "it was opened" if was_opened else "it was submitted whole"
    elif known.request is None:
        differs, how = "", "it has another content"
    else:
        # Groups of an open batch are added after it was opened.
        passed_over = ["groups"] if was_opened else []
        differs, how = await asyncio.to_thread(first_difference, known.request, request, passed_over)
        how = how or "it has another content"
    message = f"batch {name} is there already, and not the same: {f'{differs} {how}'.strip()}"
    message += (
        "; ask for it as it was, under another step or batch id, or end the run (EndRun, run.end()) before"
    )
    raise AlreadyExists("batch", name, message, field=differs)


def _check_samples(record: BatchRecord, request: pb.CancelRolloutsRequest) -> None:
    unknown = (
        Violation(f"samples[{number}]", f"prompt {each.prompt_id!r} slot {each.slot} is not in the batch")
        for number, each in enumerate(request.samples)
        if record.index_of(each.prompt_id, each.slot) is None
    )
    if violations := list(islice(unknown, ENOUGH)):
        raise InvalidArgument(violations)
