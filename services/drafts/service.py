"""Servicer of DraftService: translates between the protocol and the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc

from paceline.errors import Violation
from paceline.internal.v1 import draft_pb2 as pb
from paceline.internal.v1 import draft_pb2_grpc as rpc
from paceline.times import timestamp
from services.contracts.errors import InvalidArgument
from services.contracts.rollout import StoredRollout
from services.contracts.rollout_messages import KINDS, batches, from_proto
from services.drafts.archive import Archive
from services.drafts.metrics import DraftStoreMetrics
from services.drafts.store import DraftStore

Context = grpc.aio.ServicerContext[Any, Any]


class DraftService(rpc.DraftServiceServicer):
    """DraftService of one replica."""

    def __init__(self, store: DraftStore, archive: Archive, metrics: DraftStoreMetrics) -> None:
        self._store = store
        self._archive = archive
        self._metrics = metrics

    async def PutRollouts(
        self, request_iterator: AsyncIterator[pb.PutRolloutsRequest], context: Context
    ) -> pb.PutRolloutsResponse:
        """Store rollouts message by message; an invalid one ends the call, and earlier ones stay stored."""
        response = pb.PutRolloutsResponse()
        seen = 0
        async for request in request_iterator:
            # The index in an error counts from the beginning of the stream.
            rollouts = [
                from_proto(each, f"rollouts[{index}]") for index, each in enumerate(request.rollouts, seen)
            ]
            seen += len(rollouts)
            stored = sum(self._store.put(rollout) for rollout in rollouts)
            self._count_puts(stored, len(rollouts) - stored)
            response.stored += stored
            response.refused += len(rollouts) - stored
        return response

    async def FetchRollouts(
        self, request: pb.FetchRolloutsRequest, context: Context
    ) -> AsyncIterator[pb.FetchRolloutsResponse]:
        """Return the rollouts of prompts, prompt by prompt in the order of the request."""
        violations = [] if request.run_id else [Violation("run_id", "is empty")]
        if not request.prompt_ids:
            violations.append(Violation("prompt_ids", "is empty; name at least one prompt"))
        if violations := violations + _empty_ids(request.prompt_ids):
            raise InvalidArgument(violations)
        self._metrics.fetches.inc()
        whole = not request.omit_covered_history
        for batch in batches(self._found(request.run_id, request.prompt_ids, whole)):
            yield pb.FetchRolloutsResponse(rollouts=batch)

    async def EvictRollouts(
        self, request: pb.EvictRolloutsRequest, context: Context
    ) -> pb.EvictRolloutsResponse:
        """Remove the rollouts that match all fields that are set."""
        violations = _empty_ids(request.prompt_ids)
        if request.kind and request.kind not in KINDS:
            violations.append(Violation("kind", f"is {request.kind}; must be PREGENERATED or HISTORY"))
        if not (request.run_id or request.prompt_ids or request.before_policy_version or request.kind):
            violations.append(
                Violation("run_id", "is empty, and so is the rest; set at least one field to say what goes")
            )
        if violations:
            raise InvalidArgument(violations)
        removed = self._store.evict(
            run_id=request.run_id or None,
            prompt_ids=frozenset(request.prompt_ids),
            before_version=request.before_policy_version or None,
            kind=KINDS.get(request.kind),
        )
        self._metrics.count_removals()
        return pb.EvictRolloutsResponse(removed=removed)

    async def GetDraftStats(
        self, request: pb.GetDraftStatsRequest, context: Context
    ) -> pb.GetDraftStatsResponse:
        """Return sizes of the store."""
        store = self._store
        return pb.GetDraftStatsResponse(
            prompts=store.prompts,
            rollouts=store.rollouts.total(),
            tokens=store.tokens,
            bytes=store.bytes,
            budget_bytes=store.budget_bytes,
            evicted=store.evicted,
            snapshot_at=timestamp(self._archive.taken_at) if self._archive.taken_at else None,
        )

    def _found(self, run_id: str, prompt_ids: Sequence[str], whole: bool) -> Iterator[StoredRollout]:
        for prompt_id in dict.fromkeys(prompt_ids):
            rollouts = self._store.fetch(run_id, prompt_id, whole=whole)
            self._metrics.prompts_fetched.labels("hit" if rollouts else "miss").inc()
            self._metrics.tokens_fetched.inc(sum(len(rollout.tokens) for rollout in rollouts))
            yield from rollouts

    def _count_puts(self, stored: int, refused: int) -> None:
        self._metrics.puts.labels("stored").inc(stored)
        self._metrics.puts.labels("refused").inc(refused)
        self._metrics.count_removals()


def _empty_ids(prompt_ids: Sequence[str]) -> list[Violation]:
    return [
        Violation(f"prompt_ids[{index}]", "is empty") for index, each in enumerate(prompt_ids) if not each
    ]
