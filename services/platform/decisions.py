"""What the platform decided and why: one bounded stream in Redis that every service writes to.

An explanation is worth less than what it explains: writing one never fails a caller and never waits for Redis to
come back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.platform.store import OUTAGES
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

KEPT = 10_000
"""Decisions that are kept, at least; older ones go."""
BEGINNING, NOW = "0", "$"
"""Where to read from: all that is kept, or only what comes."""
_MAX_DETAIL_BYTES = 16 * 1024
# Below the command timeout of `store.connect`.
_BLOCK_MS, _BATCH, _PAUSE = 1000, 256, 0.5


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, explained.

    `kind` names what was decided about (speculation, draft_cap, knobs, migration, scaling), `reason` says why in
    words, and `predicted_gain` what it was expected to bring, as a share (0.1: ten percent sooner; 0: nothing, or
    nothing that can be predicted). `details` are JSON values, `time` is in unix seconds, and an empty `run_id`
    stands for the whole fleet.
    """

    kind: str
    reason: str
    predicted_gain: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    run_id: str = ""

    def to_fields(self) -> dict[str, str]:
        """The fields of its stream entry. Details that are too large or no JSON are left out, and that is said."""
        try:
            details = json.dumps(dict(self.details), separators=(",", ":"), default=str, allow_nan=False)
        except ValueError as error:
            details = json.dumps({"left_out": str(error)})
        if len(details) > _MAX_DETAIL_BYTES:
            details = json.dumps({"left_out": f"{len(details)} bytes of details"})
        gain = self.predicted_gain if isfinite(self.predicted_gain) else 0.0
        return {
            "kind": self.kind,
            "reason": self.reason,
            "predicted_gain": repr(float(gain)),
            "details": details,
            "time": repr(float(self.time)),
            "run_id": self.run_id,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> Decision:
        """Reads `to_fields`. ValueError when it is no decision."""
        text = {name.decode(): value.decode() for name, value in fields.items()}
        try:
            details = json.loads(text["details"])
            if not isinstance(details, dict):
                raise ValueError("details are no object")
            return cls(
                text["kind"],
                text["reason"],
                float(text["predicted_gain"]),
                details,
                float(text["time"]),
                text["run_id"],
            )
        except KeyError as error:
            raise ValueError(f"a decision without {error}") from error


def stream_key(namespace: str) -> str:
    """The stream of a deployment's decisions."""
    return f"{namespace}:{{decisions}}:stream"


class DecisionLog:
    """Writes and reads the decisions of one deployment."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis: Any = redis
        self._key = stream_key(namespace)
        self._reachable = True

    async def write(self, decision: Decision) -> bool:
        """Appends a decision; False, and a log line, when Redis would not have it."""
        try:
            await self._redis.xadd(self._key, decision.to_fields(), maxlen=KEPT, approximate=True)
        except RedisError as error:
            if self._reachable:
                log.warning("decision_not_written", kind=decision.kind, error=str(error))
            self._reachable = False
            return False
        self._reachable = True
        return True

    async def recent(self, count: int = 100) -> list[Decision]:
        """The latest decisions, oldest first. Raises what Redis raises."""
        entries = await self._redis.xrevrange(self._key, count=count)
        return [each for _, fields in reversed(entries) if (each := _parsed(fields)) is not None]

    async def last_id(self) -> str:
        """Where the stream ends now: what is read after it came later. Raises what Redis raises."""
        newest = await self._redis.xrevrange(self._key, count=1)
        return newest[0][0].decode() if newest else BEGINNING

    async def follow(self, after: str = NOW, run_id: str = "") -> AsyncIterator[Decision]:
        """Decisions as they come, without end; outlasts outages of Redis.

        Args:
            after: an entry's id, BEGINNING or NOW.
            run_id: only those of this run and of the whole fleet; empty: all.
        """
        while not is_cancelled():
            try:
                # An entry that comes between two reads must not be missed, so "now" is looked up once.
                after = await self.last_id() if after == NOW else after
                found = await self._redis.xread({self._key: after}, count=_BATCH, block=_BLOCK_MS)
            except OUTAGES as error:
                log.warning("decisions_unreadable", error=str(error))
                await asyncio.sleep(_PAUSE)
                continue
            for _, entries in found or ():
                for entry_id, fields in entries:
                    after = entry_id.decode()
                    decision = _parsed(fields)
                    if decision is not None and (not run_id or decision.run_id in ("", run_id)):
                        yield decision


def _parsed(fields: Mapping[bytes, bytes]) -> Decision | None:
    try:
        return Decision.from_fields(fields)
    except ValueError as error:
        log.warning("bad_decision", error=str(error))
        return None
