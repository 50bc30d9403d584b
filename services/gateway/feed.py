"""Feeds finished samples and their rewards to the learner of the drafter, through a stream in Redis.

In the background: what does not get there costs the drafter something to learn from, and nothing else. Neither the
event loop nor the delivery of a sample ever waits for it. While no learner is registered, and none was lately,
nothing is noted and nothing is sent.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.v1 import rollout_pb2, sample_pb2
from services.drafter.feed import BatchKey, Fed, FedRewards, FedSample, encode, size_of
from services.drafter.keys import DrafterKeys
from services.drafter.record import read_published
from services.gateway.batch import Batch, Ending
from services.gateway.config import GatewayConfig
from services.gateway.metrics import GatewayMetrics
from services.platform.registry import Registry
from services.platform.sampling import resolve
from services.platform.store import OUTAGES, Keys
from services.platform.tasks import end, is_cancelled

log = structlog.get_logger(__name__)

SERVICE = "drafter"
"""Name of the learner in the registry."""
MOST_WAITING = 32 << 20
"""Most bytes that wait for Redis. Above it the oldest are dropped."""
MOST_PUT = 1 << 20
"""Bytes of one round trip: little enough not to be in the way of the journal's."""
_LOOK, _PAUSE = 1.0, 0.5
# What nobody came for in so long is of a policy that is long gone.
_KEPT_SECONDS = 86_400

_WHOLE = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)


class LearnerFeed:
    """A bounded queue to the stream. `offer` and `reward` only note; `run` carries."""

    def __init__(
        self,
        config: GatewayConfig,
        redis: Redis,
        registry: Registry,
        metrics: GatewayMetrics,
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis: Any = redis
        self._key = DrafterKeys(config.namespace).feed
        self._linger = config.learner_linger_seconds
        self._most_entries = config.learner_feed_entries
        self._registry = registry
        self._metrics = metrics
        self._most = most_waiting
        self._clock = clock
        self._waiting: deque[tuple[Fed, int]] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self.drafter_version = 0
        """Published by the learner, as last seen; 0: none."""
        self._keys = Keys(config.namespace)
        self._seen_at: float | None = None

    @property
    def active(self) -> bool:
        """Whether there is a learner, or was one lately: it finds what came while it was away."""
        return self._seen_at is not None and self._clock() - self._seen_at <= self._linger

    def offer(self, batch: Batch, ending: Ending) -> None:
        """Notes a sample that has just ended, tokens still in place, if it is one to learn from."""
        if self.active and (sample := sample_of(batch, ending)) is not None:
            self._note(sample)

    def reward(self, batch: BatchKey, rewards: Iterable[rollout_pb2.Reward]) -> None:
        """Notes rewards of finished samples."""
        if not self.active:
            return
        found = {(each.prompt_id, each.slot): each.reward for each in rewards}
        if found:
            self._note(FedRewards(batch, found))

    async def run(self) -> None:
        """Carries until cancelled."""
        looking = asyncio.create_task(self._look(), name="learner-look")
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._put()
        finally:
            await end([looking])

    async def _look(self) -> None:
        while not is_cancelled():
            try:
                if await self._registry.list(SERVICE):
                    self._seen_at = self._clock()
                if self.active:
                    published = await read_published(self._redis, self._keys)
                    self.drafter_version = published.version if published is not None else 0
            except OUTAGES:
                # What was seen last is the best guess, for as long as it is believed.
                log.debug("registry_unreachable", service=SERVICE)
            await asyncio.sleep(_LOOK)

    async def _put(self) -> None:
        taken = self._take()
        pipe = self._redis.pipeline(transaction=False)
        for fed, _ in taken:
            pipe.xadd(self._key, encode(fed), maxlen=self._most_entries, approximate=True)
        pipe.expire(self._key, _KEPT_SECONDS)
        try:
            await pipe.execute()
        except OUTAGES as error:
            # They may be there all the same; the learner knows a repetition.
            log.warning("feed_unreachable", error=str(error), entries=len(taken))
            self._waiting.extendleft(reversed(taken))
            self._bytes += sum(size for _, size in taken)
            self._drop_surplus()
            await asyncio.sleep(_PAUSE)
        except RedisError as error:
            log.error("feed_refused", error=str(error), entries=len(taken))
            self._metrics.learner_feed.labels("refused").inc(len(taken))
            await asyncio.sleep(_PAUSE)
        else:
            self._metrics.learner_feed.labels("fed").inc(len(taken))

    def _note(self, fed: Fed) -> None:
        size = size_of(fed)
        self._waiting.append((fed, size))
        self._bytes += size
        self._drop_surplus()
        self._wake.set()

    def _take(self) -> list[tuple[Fed, int]]:
        taken = [self._waiting.popleft()]
        size = taken[0][1]
        while self._waiting and size + self._waiting[0][1] <= MOST_PUT:
            taken.append(self._waiting.popleft())
            size += taken[-1][1]
        self._bytes -= size
        return taken

    def _drop_surplus(self) -> None:
        dropped = 0
        while self._bytes > self._most:
            self._bytes -= self._waiting.popleft()[1]
            dropped += 1
        if dropped:
            self._metrics.learner_feed.labels("dropped").inc(dropped)


def sample_of(batch: Batch, ending: Ending) -> FedSample | None:
    """The sample as the learner gets it; None when there is nothing of the policy to be learned from it: it did not
    end by itself, or is not EXACT."""
    state = batch.samples[ending.index]
    if batch.exactness.level != sample_pb2.EXACTNESS_LEVEL_EXACT:
        return None
    if ending.status not in _WHOLE or not state.tokens:
        return None
    group = batch.groups[state.group]
    return FedSample(
        batch=batch.key,
        prompt_id=group.prompt_id,
        slot=state.slot,
        seed=state.seed if _is_plain(group.sampling) else None,
        policy_version=batch.policy_version,
        prompt=tuple(group.prompt_token_ids),
        response=tuple(state.tokens),
    )


def _is_plain(params: sample_pb2.SamplingParams) -> bool:
    """Whether every token is the policy's own choice at temperature 1."""
    it = resolve(params)
    shaped = (it.temperature, it.top_p, it.repetition_penalty) != (1.0, 1.0, 1.0)
    return not (
        shaped or it.top_k or it.min_p or it.presence_penalty or it.frequency_penalty or it.min_tokens
    )
