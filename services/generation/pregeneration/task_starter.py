"""Start pre-generation tasks as background samples of the engine loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import ServiceError
from services.generation.engine.types import Verifier
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.work_items import AdmissionTerms, check_item
from services.generation.pregeneration.leases import DraftLease
from services.generation.pregeneration.stream import BackgroundStream
from services.generation.rollouts.fetcher import ShardFetcher
from services.generation.rollouts.origin import Origin

_log = structlog.get_logger(__name__)

# How long tasks wait for the rollouts that the draft store has of their prompts.
_FETCH_SECONDS = 0.5


class TaskStarter:
    """Starts tasks on one stream, behind the tokens that the draft store has of them."""

    def __init__(
        self,
        loop: EngineLoop,
        stream: BackgroundStream,
        terms: Callable[[], AdmissionTerms],
        fetcher: ShardFetcher | None,
        *,
        near_ties: bool = False,
    ) -> None:
        """Start none yet.

        Args:
            loop: of the engine.
            stream: of the tasks' samples.
            terms: returns the terms on which samples are taken; called in the engine thread.
            fetcher: brings the store's rollouts into the loop's cache.
            near_ties: ask for the runner-up of each token of a task.
        """
        self._loop = loop
        self._stream = stream
        self._terms = terms
        self._fetcher = fetcher
        self._near_ties = near_ties
        self._fetches = 0

    async def fork(self, forks: Sequence[DraftLease]) -> list[int]:
        """Start forks; returns the handles of those that the instance refuses."""
        return await self._loop.execute(lambda: [each.handle for each in forks if not self._start(each)])

    async def start(self, leases: Sequence[DraftLease]) -> list[int]:
        """Start tasks; returns the handles of those that the instance refuses."""
        if not leases:
            return []
        await self._fetch(leases)
        return await self._loop.execute(lambda: [each.handle for each in leases if not self._start(each)])

    async def _fetch(self, leases: Sequence[DraftLease]) -> None:
        """Fetch earlier beginnings of the tasks, as far as they come in time.

        Rollouts fetched for a step are not fetched for it again, but other instances go on with these prompts
        meanwhile. So a step is named that no sample has: the next tasks fetch anew, and so do the samples of the
        real step.
        """
        if self._fetcher is None:
            return
        self._fetches += 1
        no_step = -self._fetches
        origins = {Origin(each.task.run_id, each.task.prompt_id, step=no_step) for each in leases}
        wanted = [self._fetcher.want(origin) for origin in origins]
        if fetches := {each for each in wanted if each is not None}:
            await asyncio.wait(fetches, timeout=_FETCH_SECONDS)

    def _start(self, lease: DraftLease) -> bool:
        """Start a task, behind what the same policy generated of it before; False when it is refused."""
        loop, item = self._loop, work_item(lease)
        origin = replace(Origin.of(item), fork=lease.fork)
        if not lease.fork:
            known = loop.drafts.cache.same_seed(origin, item.seed, lease.version)
            if known is not None and len(known.logprobs):
                lease.resume(known)
        item.prefix_token_ids.extend(lease.tokens)
        try:
            request = check_item(item, self._terms(), self._stream.samples, loop.next_sample_id)
            if self._near_ties and not lease.fork and request.verifier is Verifier.COUPLED:
                request = replace(request, near_ties=True)
            loop.start_sample(self._stream, lease.handle, request, origin)
        except ServiceError as error:
            _log.debug("task_refused", prompt=item.prompt_id, slot=item.slot, error=error.message)
            return False
        except Exception:
            _log.exception("task_failed", prompt=item.prompt_id, slot=item.slot)
            return False
        return True


def work_item(lease: DraftLease) -> pb.WorkItem:
    """Return a task as a work task.

    A LENIENT sample is pre-generated as a COUPLED one: lenient tokens would be a worse draft.
    """
    task = lease.task
    exactness = sample_pb2.Exactness()
    if task.exactness.level == sample_pb2.EXACTNESS_LEVEL_REJECTION:
        exactness.level = sample_pb2.EXACTNESS_LEVEL_REJECTION
    sampling = sample_pb2.SamplingParams()
    sampling.CopyFrom(task.sampling)
    # A draft is but its tokens.
    sampling.ClearField("top_logprobs")
    sampling.ClearField("prompt_logprobs")
    return pb.WorkItem(
        handle=lease.handle,
        prompt_token_ids=task.prompt_token_ids,
        sampling=sampling,
        exactness=exactness,
        seed=task.seed,
        policy_version=lease.version,
        prompt_id=task.prompt_id,
        run_id=task.run_id,
        slot=task.slot,
        step=task.step,
    )
