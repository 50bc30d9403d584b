"""Feed of finished samples, their rewards, and ends of batches to the learner, through a stream in Redis.

The feed works in the background: a lost entry costs the drafter something to learn from, and nothing else. Neither
the event loop nor the delivery of a sample ever waits for it. Unless a learner is registered, or was recently,
nothing is queued and nothing is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKey
from services.contracts.learner import (
    DrafterKeys,
    Fed,
    FedBatchEnd,
    FedRewards,
    FedSample,
    encode_entry,
    entry_bytes,
)
from services.contracts.sampling import resolve
from services.gateway.config import GatewayConfig
from services.gateway.feeds.outbox import Outbox
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.rollout_batch import RolloutBatch
from services.gateway.state.sample import SampleEnding
from services.platform.redis.connection import OUTAGES
from services.platform.redis.registry import Registry
from services.platform.tasks import end, is_cancelled

log = structlog.get_logger(__name__)

SERVICE = "drafter"
"""Name of the learner in the registry."""
MOST_WAITING = 32 << 20
"""Most bytes that wait for Redis. Above it the oldest are dropped."""
MOST_PUT = 1 << 20
"""Bytes of one round trip: few enough not to delay the journal's round trips."""
# Seconds between two reads of the registry, and after a failed write.
_LOOK, _PAUSE = 1.0, 0.5
# Seconds after the last write until the stream expires: its entries are then of an outdated policy.
_KEPT_SECONDS = 86_400
# The stream is measured, which takes Redis milliseconds, when it has grown by its bound over this number.
_MEASURED_SHARE = 16
# Memory of an entry in Redis in addition to its values.
_ENTRY_BYTES = 128

# KEYS: feed. ARGV: bytes. Removes the oldest entries of a stream that has more bytes; returns their number.
# Entries differ in size, so the share to remove is estimated from the mean until the rest fits.
_TRIM = """
local most, trimmed = tonumber(ARGV[1]), 0
local used = redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 0) or 0
local left = redis.call('XLEN', KEYS[1])
while used > most and left > 0 do
  left = left - math.ceil(left * (used - most) / used)
  trimmed = trimmed + redis.call('XTRIM', KEYS[1], 'MAXLEN', left)
  used = redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 0)
end
return trimmed
"""


class LearnerFeed:
    """Writer of the feed. `offer` and `reward` only queue; `run` writes."""

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
        self._most_bytes = config.learner_feed_bytes
        # Upper bound of the growth of the stream since it was measured, in bytes.
        self._unmeasured = self._most_bytes
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        dropped = metrics.learner_feed.labels("dropped").inc
        self._waiting: Outbox[Fed] = Outbox(most_waiting, entry_bytes, dropped)
        self._seen_at: float | None = None

    @property
    def active(self) -> bool:
        """Return True if there is a learner, or was one recently: it finds the entries of its absence."""
        return self._seen_at is not None and self._clock() - self._seen_at <= self._linger

    def offer(self, batch: RolloutBatch, ending: SampleEnding) -> None:
        """Queue a sample that has just ended, with its tokens in place, if it is one to learn from."""
        if self.active and (sample := sample_of(batch, ending)) is not None:
            self._waiting.put(sample)

    def end(self, batch: RolloutBatch) -> None:
        """Queue the end of a batch, all samples of which have ended."""
        if self.active and batch.exactness.level == sample_pb2.EXACTNESS_LEVEL_EXACT:
            self._waiting.put(FedBatchEnd(batch.key))

    def reward(self, batch: BatchKey, rewards: Iterable[rollout_pb2.Reward]) -> None:
        """Queue rewards of finished samples."""
        if not self.active:
            return
        found = {(each.prompt_id, each.slot): each.reward for each in rewards}
        if found:
            self._waiting.put(FedRewards(batch, found))

    async def run(self) -> None:
        """Write until cancelled."""
        looking = asyncio.create_task(self._look(), name="learner-look")
        try:
            while True:
                await self._waiting.wait()
                await self._put()
        finally:
            await end([looking])

    async def _look(self) -> None:
        while not is_cancelled():
            try:
                if await self._registry.list(SERVICE):
                    self._seen_at = self._clock()
            except OUTAGES:
                # Keep the last answer, the best guess, until `learner_linger_seconds` have passed.
                log.debug("registry_unreachable", service=SERVICE)
            await asyncio.sleep(_LOOK)

    async def _put(self) -> None:
        taken = self._waiting.take(MOST_PUT)
        pipe = self._redis.pipeline(transaction=False)
        for fields in map(encode_entry, taken):
            pipe.xadd(self._key, fields)
            self._unmeasured += _ENTRY_BYTES + sum(map(len, fields.values()))
        pipe.expire(self._key, _KEPT_SECONDS)
        step = self._most_bytes // _MEASURED_SHARE
        measured = self._unmeasured >= step
        if measured:
            pipe.eval(_TRIM, 1, self._key, self._most_bytes - 2 * step)
        try:
            replies = await pipe.execute()
        except OUTAGES as error:
            # The entries may have arrived; the learner recognizes repetitions.
            log.warning("feed_unreachable", error=str(error), entries=len(taken))
            self._waiting.put_back(taken)
            await asyncio.sleep(_PAUSE)
        except RedisError as error:
            log.error("feed_refused", error=str(error), entries=len(taken))
            self._metrics.learner_feed.labels("refused").inc(len(taken))
            await asyncio.sleep(_PAUSE)
        else:
            self._metrics.learner_feed.labels("fed").inc(len(taken))
            if measured:
                self._unmeasured = 0
                self._metrics.learner_feed.labels("trimmed").inc(replies[-1])


def sample_of(batch: RolloutBatch, ending: SampleEnding) -> FedSample | None:
    """Return the entry of a sample; None if the policy cannot be learned from it.

    That is a sample that was aborted or failed, is not EXACT, is of several policy versions, has first tokens from
    its caller (which may be of another version), or has no name.
    """
    state = batch.samples[ending.index]
    if batch.exactness.level != sample_pb2.EXACTNESS_LEVEL_EXACT:
        return None
    if not ending.is_whole or len(state.columns.versions) != 1:
        return None
    group = batch.groups[state.group]
    if group.prefix or not batch.cached_run:
        return None
    run_id, batch_id = batch.key
    return FedSample(
        batch=(run_id, batch.rewarded_as or batch_id),
        prompt_id=group.prompt_id,
        slot=state.slot,
        seed=state.seed if _is_plain(group.sampling) and not state.environment else None,
        policy_version=state.columns.versions[0][1],
        prompt=tuple(group.prompt_token_ids),
        response=tuple(state.tokens),
    )


def _is_plain(params: sample_pb2.SamplingParams) -> bool:
    """Return True if every token is the policy's own choice at temperature 1."""
    it = resolve(params)
    shaped = (it.temperature, it.top_p, it.repetition_penalty) != (1.0, 1.0, 1.0)
    penalised = it.presence_penalty or it.frequency_penalty or it.min_tokens
    return not (shaped or penalised or it.top_k or it.min_p or it.allowed_token_ids or it.json_schema)


class EndedSingles:
    """Names of the last samples of Generate calls that were completed or truncated, to match their rewards.

    They are in memory only: reports on samples of a former gateway are not matched, which costs the drafter rewards
    to learn from, and nothing else.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        """Remember the last `most` samples."""
        self._most = most
        self._names: OrderedDict[tuple[str, int, str, int], None] = OrderedDict()

    def add(self, batch: RolloutBatch, index: int) -> None:
        """Remember a sample that has ended."""
        name = (batch.key[0], batch.step, batch.group_of(index).prompt_id, batch.samples[index].slot)
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def known(
        self, run_id: str, step: int, rewards: Iterable[rollout_pb2.Reward]
    ) -> list[rollout_pb2.Reward]:
        """Return the rewards whose sample is remembered."""
        return [each for each in rewards if (run_id, step, each.prompt_id, each.slot) in self._names]
