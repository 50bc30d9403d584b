"""The place of pre-generation in an instance: what it asks of the engine thread, and what it must know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import structlog

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.drafts.rollout import Rollout
from services.generation.config import GenerationConfig
from services.generation.items import Terms, check_item
from services.generation.loop import EngineLoop
from services.generation.pregeneration.leases import Lease
from services.generation.pregeneration.stream import BackgroundStream
from services.generation.rollouts.origin import Origin
from services.platform.errors import ServiceError

T = TypeVar("T")
_log = structlog.get_logger(__name__)

# How long items wait for what the draft store has of their prompts.
_FETCH_SECONDS = 0.5


class Fetcher(Protocol):
    """What is used of `services.generation.rollouts.fetcher.ShardFetcher`."""

    def want(self, origin: Origin) -> asyncio.Future[None] | None: ...


class Seat:
    """The engine loop of an instance as pre-generation uses it. Its methods run in the event loop.

    Raises Unavailable, from any of them, when the engine has ended.
    """

    def __init__(
        self,
        config: GenerationConfig,
        epoch: int,
        loop: EngineLoop,
        terms: Callable[[], Terms],
        fetcher: Fetcher | None = None,
    ) -> None:
        """
        Args:
            config: of the instance.
            epoch: under which it is registered.
            loop: its engine.
            terms: on what terms samples are taken; asked in the engine thread.
            fetcher: brings what the draft store has of a prompt into the loop's cache.
        """
        self.instance_id = config.instance_id
        self.epoch = epoch
        self.seats = config.max_num_seqs
        self.reserved = config.background_threshold
        self._loop = loop
        self._terms = terms
        self._fetcher = fetcher
        self._fetches = 0
        self.stream = BackgroundStream(asyncio.get_running_loop(), loop.background, self._is_open)

    @property
    def policy_version(self) -> int:
        """The version that samples started now would be of."""
        return self._loop.policy_version

    async def open(self) -> None:
        """Let the loop serve the stream, and report where it stands."""

        def open_stream() -> None:
            self._loop.open(self.stream)

        await self._call(open_stream)

    def close(self) -> None:
        """End all that is running, without waiting for it."""
        self._loop.call(lambda: self._loop.close(self.stream))

    async def start(self, leases: Sequence[Lease]) -> list[int]:
        """Start items; the handles of those that the instance does not take."""
        if not leases:
            return []
        await self._fetch(leases)
        return await self._call(lambda: [lease.handle for lease in leases if not self._start(lease)])

    async def end(self, handles: Sequence[int]) -> None:
        """End these items now, as they are."""
        samples = self.stream.samples

        def end_them() -> int:
            return self._loop.abort_samples([samples[each] for each in handles if each in samples])

        await self._call(end_them)

    async def end_all(self) -> int:
        """End all items now, as they are; the number that was ended."""
        return await self._call(self._loop.end_background)

    async def sleep(self) -> None:
        """Leave the device to others, unless there is real work."""
        if not self._loop.asleep:
            await self._call(self._loop.sleep)

    async def wake(self) -> None:
        """Take the device back."""
        if self._loop.asleep:
            await self._call(self._loop.wake)

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        """Remember what was generated here, for the real samples that may come here too."""
        self._loop.call(lambda: self._loop.keep(rollouts))

    async def _fetch(self, leases: Sequence[Lease]) -> None:
        """Have earlier beginnings of the items at hand, as far as they come in time.

        What is fetched for a step is not fetched for it again, but others go on with these prompts meanwhile. So
        it is fetched for no step: the next items will ask anew, and so will the samples of the step.
        """
        if self._fetcher is None:
            return
        self._fetches += 1
        nowhen = -self._fetches
        origins = {Origin(each.item.run_id, each.item.prompt_id, step=nowhen) for each in leases}
        wanted = [self._fetcher.want(origin) for origin in origins]
        if fetches := {each for each in wanted if each is not None}:
            await asyncio.wait(fetches, timeout=_FETCH_SECONDS)

    # -- in the engine thread -----------------------------------------------------------------------------

    def _is_open(self) -> bool:
        return not self._loop.paused and not self._terms().closed

    def _start(self, lease: Lease) -> bool:
        """Start an item, behind what the same policy generated of it before; whether it was taken."""
        loop, item = self._loop, work_item(lease)
        origin = Origin.of(item)
        known = loop.drafts.cached(origin, item.seed)
        if known is not None and known.version == lease.version and len(known.logprobs):
            lease.resume(known)
            item.prefix_token_ids.extend(lease.tokens)
        try:
            request = check_item(item, self._terms(), self.stream.samples, loop.next_sample_id)
            loop.start_sample(self.stream, lease.handle, request, origin)
        except ServiceError as error:
            _log.debug("item_refused", prompt=item.prompt_id, slot=item.slot, error=error.message)
            return False
        except Exception:
            _log.exception("item_failed", prompt=item.prompt_id, slot=item.slot)
            return False
        return True

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._loop.call(function))


def work_item(lease: Lease) -> pb.WorkItem:
    """An item as work: sampled by the policy alone, since what was sampled leniently would be a worse guess."""
    item = lease.item
    exactness = sample_pb2.Exactness()
    if item.exactness.level == sample_pb2.EXACTNESS_LEVEL_REJECTION:
        exactness.level = sample_pb2.EXACTNESS_LEVEL_REJECTION
    return pb.WorkItem(
        handle=lease.handle,
        prompt_token_ids=item.prompt_token_ids,
        sampling=item.sampling,
        exactness=exactness,
        seed=item.seed,
        policy_version=lease.version,
        prompt_id=item.prompt_id,
        run_id=item.run_id,
        slot=item.slot,
        step=item.step,
    )
