"""Intake of the items of work streams: starts items, parks them until their rollouts are cached, and aborts them.

The JSON schema of an item is first checked in a thread, because compiling it may take a second.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from paceline.errors import Violation
from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of
from paceline.v1 import sample_pb2
from services.contracts.errors import InvalidArgument, ServiceError
from services.contracts.sampling import ModelLimits, Sampling, resolve
from services.generation.draft_cache.cache import RolloutMetrics
from services.generation.draft_cache.fetcher import ShardFetcher
from services.generation.draft_cache.origin import Origin
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.work_items import AdmissionTerms, check_item, refusal
from services.generation.loop.work_stream import WorkStream

_log = structlog.get_logger(__name__)

_THREADS = 2
Fetch = asyncio.Future[None]
# Levels at which a prompt's history is more than drafts: it is taken over, or has the sample's own noise.
_NEED_HISTORY = (sample_pb2.EXACTNESS_LEVEL_LENIENT, sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY)


class SchemaChecks:
    """Compiles schemas in separate threads, so that the engine finds them compiled."""

    def __init__(self, check: Callable[[Sampling, Sequence[int]], str], seconds: float = 10.0) -> None:
        """Check by `check`, which returns a fault or ""; a schema that takes longer than `seconds` is refused."""
        self._check = check
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="schemas")

    @classmethod
    def of_model(cls, folder: Path, limits: ModelLimits) -> SchemaChecks:
        """Return the checks of an instance whose engine was built."""
        # Imports vLLM, which the engine has done first.
        from services.generation.engine.grammars import schema_fault

        return cls(partial(schema_fault, folder, limits))

    async def fault(self, item: pb.WorkItem) -> str:
        """Return the fault of an item's schema; "" if it has none."""
        sampling, prefix = resolve(item.sampling), list(item.prefix_token_ids)
        checked = asyncio.get_running_loop().run_in_executor(self._threads, self._check, sampling, prefix)
        try:
            return await asyncio.wait_for(checked, self._seconds)
        except TimeoutError:
            return f"is too complicated: it could not be compiled in {self._seconds:g} s"
        except Exception as error:
            _log.exception("schema_check_failed")
            return f"could not be compiled ({type(error).__name__})"


class SampleIntake:
    """Receives requests of work streams in the event loop and carries them out in the engine thread."""

    def __init__(
        self,
        loop: EngineLoop,
        terms: Callable[[], AdmissionTerms],
        fetcher: ShardFetcher | None,
        claim: Callable[[WorkStream, pb.Claim], None],
        metrics: RolloutMetrics,
        wait_seconds: float,
        schemas: SchemaChecks | None = None,
    ) -> None:
        """Start samples on a loop.

        Args:
            loop: where samples run.
            terms: returns the terms on which samples are taken now.
            fetcher: of rollouts; None: there is no draft store, and items do not wait.
            claim: gives a sample that was moved here to the stream that claims it, in the engine thread.
            metrics: counts waits that expired.
            wait_seconds: longest time that an item is parked for its rollouts.
            schemas: checks of JSON schemas; None: items with one are not checked beforehand.
        """
        self._loop = loop
        self._terms = terms
        self._fetcher = fetcher
        self._claim = claim
        self._metrics = metrics
        self._wait_seconds = wait_seconds
        self._schemas = schemas
        self._waits: set[asyncio.Task[None]] = set()

    def open(self, stream: WorkStream) -> asyncio.Future[None]:
        """Serve a stream; the future resolves once the engine does, with Unavailable if the engine has ended."""
        return asyncio.wrap_future(self._loop.call(lambda: self._loop.open(stream)))

    def take(self, stream: WorkStream, request: pb.WorkRequest) -> None:
        """Start, claim and abort the samples of a request, in the background."""
        items = [(item, self._fetch(item)) for item in request.start]
        aborts = list(request.abort)
        claims = list(request.claim)
        if request.HasField("report_interval"):
            interval = seconds_of(request.report_interval)
            self._loop.call(lambda: stream.report_every(interval))
        self._loop.call(lambda: self._take(stream, items, aborts, claims))
        waiting: dict[Fetch, list[pb.WorkItem]] = {}
        for item, fetch in items:
            if self._is_checked(item):
                self._begin(self._release_checked(stream, item, fetch))
            elif fetch is not None:
                waiting.setdefault(fetch, []).append(item)
        for fetch, parked in waiting.items():
            self._begin(self._release_in_time(stream, parked, fetch))

    def _begin(self, wait: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(wait)
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    def _is_checked(self, item: pb.WorkItem) -> bool:
        """Return True if an item is parked until its JSON schema is compiled."""
        return self._schemas is not None and bool(item.sampling.json_schema)

    def close(self, stream: WorkStream) -> None:
        """Forget a stream whose caller is gone, and all of its samples."""

        def forget() -> None:
            stream.parked.clear()
            self._loop.close(stream)

        self._loop.call(forget)

    def _fetch(self, item: pb.WorkItem) -> Fetch | None:
        """Fetch the rollouts of an item's prompt; returns the fetch that the item has to wait for, if any."""
        lenient = item.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
        if self._fetcher is None or not (lenient or self._loop.drafts.speculation is not None):
            return None
        fetch = self._fetcher.want(Origin.of(item), whole=item.exactness.level in _NEED_HISTORY)
        # A resumed sample takes over no rollout any more.
        return fetch if lenient and not item.prefix_token_ids else None

    async def _release_in_time(self, stream: WorkStream, items: Sequence[pb.WorkItem], fetch: Fetch) -> None:
        # Not wait_for, which would cancel a future that others wait for, too.
        await asyncio.wait([fetch], timeout=self._wait_seconds)
        if not fetch.done():
            self._metrics.waits_expired.inc(len(items))
        self._loop.call(lambda: self._release(stream, items))

    async def _release_checked(self, stream: WorkStream, item: pb.WorkItem, fetch: Fetch | None) -> None:
        """Start an item whose schema can be served, or refuse it."""
        assert self._schemas is not None
        if fault := await self._schemas.fault(item):
            self._loop.call(lambda: self._refuse(stream, item, fault))
        elif fetch is not None:
            await self._release_in_time(stream, [item], fetch)
        else:
            self._loop.call(lambda: self._release(stream, [item]))

    # -- in the engine thread -----------------------------------------------------------------------------

    def _take(
        self,
        stream: WorkStream,
        items: Iterable[tuple[pb.WorkItem, Fetch | None]],
        aborts: Iterable[int],
        claims: Iterable[pb.Claim] = (),
    ) -> None:
        for item, fetch in items:
            self._start(stream, item, parks=fetch is not None or self._is_checked(item))
        for claim in claims:
            self._claim(stream, claim)
        running = []
        for handle in aborts:
            if stream.parked.pop(handle, None) is not None:
                stream.finish_unstarted(handle)
            elif handle in stream.samples:
                running.append(stream.samples[handle])
        self._loop.abort_samples(running)

    def _release(self, stream: WorkStream, items: Iterable[pb.WorkItem]) -> None:
        for item in items:
            # It may have been aborted meanwhile, and its handle reused.
            if stream.parked.get(item.handle) is item:
                del stream.parked[item.handle]
                self._start(stream, item, parks=False)

    def _refuse(self, stream: WorkStream, item: pb.WorkItem, fault: str) -> None:
        if stream.parked.get(item.handle) is item:
            del stream.parked[item.handle]
            stream.refuse(refusal(item.handle, InvalidArgument([Violation("sampling.json_schema", fault)])))

    def _start(self, stream: WorkStream, item: pb.WorkItem, *, parks: bool) -> None:
        loop = self._loop
        taken: ChainMap[int, Any] = ChainMap(stream.samples, stream.parked)  # type: ignore[arg-type]
        try:
            request = check_item(item, self._terms(), taken, loop.next_sample_id, loop.drafts.cache)
            if parks:
                stream.parked[item.handle] = item
            else:
                origin, trace = Origin.of(item), item.trace_parent
                loop.start_sample(stream, item.handle, request, origin, trace, streamed=item.streamed)
        except ServiceError as error:
            stream.refuse(refusal(item.handle, error))
        except Exception as error:
            _log.exception("item_failed", handle=item.handle)
            stream.refuse(refusal(item.handle, error))
