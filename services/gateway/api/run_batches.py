"""Batches of a run as a whole: their progress, pages of them, and the end of the run."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from paceline.errors import Violation
from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import InvalidArgument, NotFound, Unavailable
from services.contracts.gateway_keys import BatchKey
from services.gateway.api.delivery import Delivery
from services.gateway.api.hints import Hinting
from services.gateway.api.intake import BatchRecovery
from services.gateway.api.submissions import Submissions
from services.gateway.api.validation import check_names, check_run
from services.gateway.journal.record import BatchRecord
from services.platform.security.caller import may_see

log = structlog.get_logger(__name__)

_MOST_LISTED = 1000
# Between the parts of a page token; no name contains it.
_SEPARATOR = "\n"


@dataclass(eq=False)
class RunBatches:
    """Batches that are in work or in memory, for one term of leadership."""

    recovery: BatchRecovery
    submissions: Submissions
    delivery: Delivery
    hinting: Hinting

    async def get(self, key: BatchKey) -> pb.BatchStatus:
        """Return how far a batch is.

        Raises:
            InvalidArgument: there can be no such name.
            NotFound: nothing of the batch is kept.
        """
        if violations := check_names(*key):
            raise InvalidArgument(violations)
        status = status_of(await self.recovery.known(key))
        self.recovery.intake.batches.use(key)
        return status

    def list(self, request: pb.ListBatchesRequest) -> pb.ListBatchesResponse:
        """Return a page of the batches that are in work or in memory, of runs that the caller may name."""
        return page_of((each for each in self.recovery.intake.records.all() if may_see(each.key[0])), request)

    async def end(self, run_id: str) -> pb.EndRunResponse:
        """Cancel what is unfinished of a run, and let go of all that is kept for it.

        It returns once every sample has ended and Redis has forgotten them. What it has not got to when the caller
        goes is left as it is, and is done by the next call.
        """
        if violations := check_run(run_id):
            raise InvalidArgument(violations)
        found = [record for record in self.recovery.intake.records.all() if record.key[0] == run_id]
        cancelled = released = 0
        for record in found:
            # NotFound: it was finished, and was forgotten meanwhile.
            with contextlib.suppress(NotFound):
                request = pb.CancelRolloutsRequest(run_id=run_id, batch_id=record.key[1])
                cancelled += await self.submissions.cancel(request)
        for record in found:
            with contextlib.suppress(NotFound):
                ended = await self._ended(record)
                released += not ended.is_acknowledged
                await self.delivery.acknowledge(ended.key, ended.last)
        await self.hinting.forget(run_id)
        log.info("run_ended", run=run_id, batches=released, cancelled=cancelled)
        return pb.EndRunResponse(batches=released, cancelled=cancelled)

    async def _ended(self, found: BatchRecord) -> BatchRecord:
        """Return the record of a batch once every sample has ended and is in Redis.

        NotFound if it was forgotten, also where the run has submitted another one under its name since.
        """
        key = found.key
        while True:
            record = await self.recovery.known(key)
            if record.head.accepted_at != found.head.accepted_at:
                raise NotFound("batch", "/".join(key))
            running = self.recovery.intake.batches.by_key.get(key)
            changed = None if running is None else running.changed.next_change()
            if record.is_complete:
                return record
            if changed is None:
                raise Unavailable(f"batch {'/'.join(key)} is not being worked on here; come again")
            await changed.wait()


def status_of(record: BatchRecord) -> pb.BatchStatus:
    """Return how far a batch is."""
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

    A token names the batch that was the last of its page. Batches that come or go between two pages do not make
    others come twice or not at all.

    Raises:
        InvalidArgument: the page token is none.
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
