"""Write and read the decision log: one bounded stream in Redis of what services decided and why.

Writing a decision never fails its caller and never waits for an outage of Redis to end.
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

from services.platform.redis.connection import OUTAGES
from services.platform.tasks import is_cancelled

log = structlog.get_logger(__name__)

KEPT = 10_000
"""Fewest decisions that are kept, in at most 175 MB; older ones are dropped."""
BEGINNING, NOW = "0", "$"
"""Entry to read from: the oldest kept, or only future ones."""
_MAX_DETAIL_BYTES = 16 * 1024
_MAX_REASON = 1000
_MAX_POSTED = 1000
# Blocks for less than the command timeout of `connect`.
_BLOCK_MS, _BATCH, _PAUSE = 1000, 256, 0.5


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision and its reason, as stored.

    `kind` is the subject (speculation, draft_cap, knobs, migration, scaling), `reason` a sentence, and
    `predicted_gain` the expected gain as a share (0.1: ten percent faster; 0: none, or not predictable). `details`
    are JSON values, `time` is in unix seconds, and an empty `run_id` means the whole fleet.
    """

    kind: str
    reason: str
    predicted_gain: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    run_id: str = ""

    def to_fields(self) -> dict[str, str]:
        """Return the fields of its stream entry.

        Details that are too large or not JSON are replaced by a note that says so, and a long reason is cut,
        so that the number of entries bounds the bytes.
        """
        try:
            details = json.dumps(dict(self.details), separators=(",", ":"), default=str, allow_nan=False)
        except ValueError as error:
            details = json.dumps({"left_out": str(error)})
        if len(details) > _MAX_DETAIL_BYTES:
            details = json.dumps({"left_out": f"{len(details)} bytes of details"})
        gain = self.predicted_gain if isfinite(self.predicted_gain) else 0.0
        numbers = {"predicted_gain": repr(float(gain)), "time": repr(float(self.time))}
        return {
            "kind": self.kind,
            "reason": self.reason[:_MAX_REASON],
            "details": details,
            "run_id": self.run_id,
            **numbers,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> DecisionRecord:
        """Read `to_fields`; ValueError if it is no decision."""
        text = {name.decode(): value.decode() for name, value in fields.items()}
        try:
            details = json.loads(text["details"])
            if not isinstance(details, dict):
                raise ValueError("details are no object")
            gain, time = float(text["predicted_gain"]), float(text["time"])
            return cls(text["kind"], text["reason"], gain, details, time, text["run_id"])
        except KeyError as error:
            raise ValueError(f"a decision without {error}") from error


def stream_key(namespace: str) -> str:
    """Return the stream of a deployment's decisions."""
    return f"{namespace}:{{decisions}}:stream"


class DecisionLog:
    """Writes and reads the decisions of one deployment."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis: Any = redis
        self._key = stream_key(namespace)
        self._reachable = True
        self._posted: asyncio.Queue[DecisionRecord] = asyncio.Queue(_MAX_POSTED)

    def post(self, decision: DecisionRecord) -> None:
        """Queue a decision for `run` to write, without waiting; a full queue drops its oldest one."""
        if self._posted.full():
            log.warning("decision_dropped", kind=self._posted.get_nowait().kind)
        self._posted.put_nowait(decision)

    async def run(self) -> None:
        """Write posted decisions until cancelled."""
        while not is_cancelled():
            await self.write(await self._posted.get())
        raise asyncio.CancelledError

    async def write(self, decision: DecisionRecord) -> bool:
        """Append a decision; on an error of Redis log it and return False."""
        try:
            await self._redis.xadd(self._key, decision.to_fields(), maxlen=KEPT, approximate=True)
        except RedisError as error:
            if self._reachable:
                log.warning("decision_not_written", kind=decision.kind, error=str(error))
            self._reachable = False
            return False
        self._reachable = True
        return True

    async def recent(self, count: int = 100) -> list[DecisionRecord]:
        """Return the latest decisions, oldest first. Raises errors of Redis."""
        entries = await self._redis.xrevrange(self._key, count=count)
        return [each for _, fields in reversed(entries) if (each := _parsed(fields)) is not None]

    async def last_id(self) -> str:
        """Return the id of the newest entry. Raises errors of Redis."""
        newest = await self._redis.xrevrange(self._key, count=1)
        return newest[0][0].decode() if newest else BEGINNING

    async def kept(self, after: str = BEGINNING, run_id: str = "") -> AsyncIterator[DecisionRecord]:
        """Yield the decisions stored now, and end. Arguments as of `follow`; raises errors of Redis."""
        last, read = await self.last_id(), True
        while read:
            entries = await self._redis.xrange(self._key, f"({after}", last, count=_BATCH)
            for entry_id, fields in entries:
                after = entry_id.decode()
                decision = _parsed(fields)
                if decision is not None and (not run_id or decision.run_id in ("", run_id)):
                    yield decision
            read = len(entries) == _BATCH

    async def follow(self, after: str = NOW, run_id: str = "") -> AsyncIterator[DecisionRecord]:
        """Yield decisions as they are written, without end and through outages of Redis.

        Args:
            after: an entry's id, BEGINNING or NOW.
            run_id: only decisions of this run and of the whole fleet; empty: all.
        """
        while not is_cancelled():
            try:
                # "Now" is resolved once, so that no entry between two reads is missed.
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


def _parsed(fields: Mapping[bytes, bytes]) -> DecisionRecord | None:
    try:
        return DecisionRecord.from_fields(fields)
    except ValueError as error:
        log.warning("bad_decision", error=str(error))
        return None
