"""Answer calls about whole batches and runs: the status of a batch, pages of batches, and the end of a run."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from paceline.errors import Violation
from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import InvalidArgument, NotFound
from services.contracts.gateway_keys import BatchKey
from services.gateway.api.delivery import Delivery
from services.gateway.api.hints import Hinting
from services.gateway.api.intake import BatchRecovery, check_batch_name, not_in_work
from services.gateway.api.submissions import Submissions
from services.gateway.api.validation import check_run
from services.gateway.journal.record import BatchRecord, RecordedBatches
from services.gateway.scheduler.active_batches import ActiveBatches
from services.platform.security.caller import may_see

log = structlog.get_logger(__name__)

_MOST_LISTED = 1000
# Separates the parts of a page token; no name contains it.
_SEPARATOR = "\n"


@dataclass(eq=False)
class RunBatches:
    """Batches that are in work or in memory, for one term of leadership."""

    records: RecordedBatches
    batches: ActiveBatches
    recovery: BatchRecovery
    submissions: Submissions
    delivery: Delivery
    hinting: Hinting

    async def get(self, key: BatchKey) -> pb.BatchStatus:
        """Return the status of a batch.

        Raises:
            InvalidArgument: there can be no such name.
            NotFound: the batch is not known.
        """
        check_batch_name(key)
        status = status_of(await self.recovery.known(key))
        self.batches.use(key)
        return status

    def list(self, request: pb.ListBatchesRequest) -> pb.ListBatchesResponse:
        """Return a page of the batches that are in work or in memory, of runs that the caller may see."""
        return page_of((each for each in self.records.all() if may_see(each.key[0])), request)

    async def end(self, run_id: str) -> pb.EndRunResponse:
        """Cancel the unfinished samples of a run, and release all its data.

        Returns once every sample has ended and Redis has dropped it. If the call is cancelled, the next one does
        the rest.
        """
        if violations := check_run(run_id):
            raise InvalidArgument(violations)
        found = [record for record in self.records.all() if record.key[0] == run_id]
        cancelled = released = 0
        for record in found:
            # NotFound: the batch was finished, and was forgotten meanwhile.
            with contextlib.suppress(NotFound):
                request = pb.CancelRolloutsRequest(run_id=run_id, batch_id=record.key[1])
                cancelled += await self.submissions.cancel(request)
        for record in found:
            with contextlib.suppress(NotFound):
                ended = await self._ended(record)
                released += not ended.is_acknowledged
                await self.delivery.acknowledge(ended.key, ended.last)
        self.recovery.scheduler.forget_run(run_id)
        await self.hinting.forget(run_id)
        log.info("run_ended", run=run_id, batches=released, cancelled=cancelled)
        return pb.EndRunResponse(batches=released, cancelled=cancelled)

    async def _ended(self, found: BatchRecord) -> BatchRecord:
        """Return the record of a batch once every sample has ended and is in Redis.

        NotFound if it was forgotten, even if the run has submitted another batch under its name since.
        """
        key = found.key
        while True:
            record = await self.recovery.known(key)
            if record.head.accepted_at != found.head.accepted_at:
                raise NotFound("batch", "/".join(key))
            running = self.batches.by_key.get(key)
            changed = None if running is None else running.changed.next_change()
            if record.is_complete:
                return record
            if changed is None:
                raise not_in_work(key)
            await changed.wait()


def status_of(record: BatchRecord) -> pb.BatchStatus:
    """Return the status of a batch."""
    run_id, batch_id = record.key
    status = pb.BatchStatus(
        run_id=run_id,
        batch_id=batch_id,
        step=record.step,
        policy_version=record.policy_version,
        total=record.total,
        finished=record.finished,
        acknowledged=record.acknowledged,
        cursor=record.written,
        open=record.open,
    )
    status.accepted_at.FromNanoseconds(round(record.head.accepted_at * 1e9))
    return status


def page_of(records: Iterable[BatchRecord], request: pb.ListBatchesRequest) -> pb.ListBatchesResponse:
    """Return a page of batches, in order of acceptance.

    A token names the last batch of its page, so batches that appear or disappear between two pages cause no other
    batch to be repeated or skipped.

    Raises:
        InvalidArgument: the page token is invalid.
    """
    after = _position(request.page_token)
    size = min(request.page_size or _MOST_LISTED, _MOST_LISTED)
    wanted = [each for each in records if request.run_id in ("", each.key[0])]
    wanted.sort(key=_order)
    begin = bisect_right(wanted, after, key=_order) if after is not None else 0
    page = wanted[begin : begin + size]
    more = begin + size < len(wanted)
    token = _SEPARATOR.join(map(str, (page[-1].head.accepted_at, *page[-1].key))) if more else ""
    return pb.ListBatchesResponse(batches=map(status_of, page), next_page_token=token)


def _order(record: BatchRecord) -> tuple[float, str, str]:
    return record.head.accepted_at, *record.key


def _position(token: str) -> tuple[float, str, str] | None:
    if not token:
        return None
    try:
        accepted_at, run_id, batch_id = token.split(_SEPARATOR)
        return float(accepted_at), run_id, batch_id
    except ValueError:
        found = "is not a token that this method has returned"
        raise InvalidArgument([Violation("page_token", found)]) from None
