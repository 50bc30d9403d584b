"""The lenience that batches get, and how it follows a run's KL target.

The l of a run that asks for a KL target is in Redis, so that it outlives the gateway. Each reported batch moves
it once (services/drafts/lenience.py says how far), however often and by whichever gateway its report is taken.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from paceline.v1 import sample_pb2
from services.drafts.lenience import FLOOR, next_lenience
from services.gateway import scripts
from services.gateway.batch import BatchKey
from services.gateway.journal import Fenced
from services.gateway.keys import GatewayKeys
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger(__name__)

# A run that reports nothing for so long begins anew.
_KEPT_SECONDS = 30 * 86400
# Reported batches that are remembered: far more than a trainer has in flight.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class RunLenience:
    """The l of a run's next batch, and the batches whose reports it contains, last ones last. Pure."""

    lenience: float
    reported: tuple[str, ...] = ()

    def after(self, batch_id: str, kl: float, target: float) -> "RunLenience":
        """This with the report of one more batch; unchanged when it was reported before."""
        if batch_id in self.reported:
            return self
        reported = (*self.reported, batch_id)[-_REMEMBERED:]
        return RunLenience(next_lenience(self.lenience, kl, target), reported)

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps({"lenience": self.lenience, "reported": self.reported})

    @classmethod
    def from_json(cls, text: str | bytes) -> "RunLenience":
        """What `to_json` made."""
        kept = json.loads(text)
        return cls(float(kept["lenience"]), tuple(kept["reported"]))


class Leniences:
    """The l of every run, as the holder of the lease. Methods raise what Redis raises."""

    def __init__(self, redis: Redis, namespace: str, token: str, metrics: GatewayMetrics) -> None:
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._token = token
        self._metrics = metrics
        self._lock = asyncio.Lock()

    async def choose(self, run_id: str, requested: sample_pb2.Exactness) -> float | None:
        """The l of a batch (or sample) that asks for this exactness; None when its level has none."""
        if requested.level != sample_pb2.EXACTNESS_LEVEL_LENIENT:
            return None
        chosen = requested.lenience if requested.HasField("lenience") else FLOOR
        if requested.HasField("kl_target"):
            known = await self._load(run_id)
            chosen = chosen if known is None else known.lenience
        self._metrics.runs.show(run_id, time.time(), lenience=chosen)
        return chosen

    async def report(self, key: BatchKey, used: float, kl: float, target: float) -> None:
        """Moves the l of a run by what the trainer measured on one of its batches, which had the l `used`.
        Fenced when another gateway has taken over."""
        run_id, batch_id = key
        async with self._lock:
            before = await self._load(run_id) or RunLenience(used)
            after = before.after(batch_id, kl, target)
            if after is before:
                return
            await self._save(run_id, after)
        log.info(
            "lenience_moved", run=run_id, batch=batch_id, kl=kl, target=target, to=after.lenience, used=used
        )

    async def _load(self, run_id: str) -> RunLenience | None:
        text = await self._redis.get(self._keys.lenience(run_id))
        return None if text is None else RunLenience.from_json(text)

    async def _save(self, run_id: str, state: RunLenience) -> None:
        keys = (self._keys.lease, self._keys.lenience(run_id))
        args = (self._token, state.to_json(), _KEPT_SECONDS)
        try:
            await self._redis.eval(scripts.KEEP, len(keys), *keys, *args)
        except ResponseError as error:
            if str(error).startswith("FENCED"):
                raise Fenced(str(error)) from error
            raise
