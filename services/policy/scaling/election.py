"""Who of several controllers scales: a Lease in Kubernetes.

Clocks of different machines are never compared: a lease is over when it has not been seen to change for as long as
it lasts, by the clock of whoever looks. Its holder stops earlier than that by its own clock.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from services.policy.scaling.cluster import Cluster, LeaseRecord
from services.policy.scaling.errors import ApiConflict, ClusterError
from services.policy.scaling.metrics import ScalingMetrics

log = structlog.get_logger(__name__)

_RENEW, _TRUST = 1 / 5, 2 / 3
"""Shares of the lease's time: after the first it is renewed, and for the second it is relied on."""


@dataclass(slots=True)
class Sighting:
    """The lease as it was last seen to change, and when (monotonic seconds)."""

    version: str
    at: float


def may_take(record: LeaseRecord, me: str, seen: Sighting, now: float) -> bool:
    """Whether the lease is ours already, free, or over. Pure."""
    if not record.holder or record.holder == me:
        return True
    return now - seen.at >= record.seconds


class Election:
    """`run` until cancelled; `leading` says whether this controller may act now.

    `notes` are annotations of the lease: what a leader wants its successor to know. They are those of the lease as
    it was taken, and change by `note`.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        identity: str,
        seconds: float,
        metrics: ScalingMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.changed = asyncio.Event()
        """Set whenever leadership was won; whoever waits for it clears it."""
        self._cluster = cluster
        self._name = name
        self._me = identity
        self._seconds = seconds
        self._metrics = metrics
        self._clock = clock
        self._record = LeaseRecord()
        self._seen = Sighting("", clock())
        self._trusted_until = float("-inf")
        self._led = False
        # Writing the lease is reading it, changing it and writing it back.
        self._lock = asyncio.Lock()

    @property
    def leading(self) -> bool:
        """True while the lease is ours beyond doubt."""
        leading = self._clock() < self._trusted_until
        if self._led and not leading:
            self._led = False
            log.warning("lease_lost", lease=self._name)
            self._metrics.leader.set(0)
        return leading

    @property
    def notes(self) -> dict[str, str]:
        """What the lease says besides, as of its last change by us."""
        return dict(self._record.notes)

    async def run(self) -> None:
        """Takes the lease when it can be had, and renews it; gives it back when cancelled."""
        try:
            while True:
                await self._turn()
                await asyncio.sleep(self._seconds * _RENEW)
        finally:
            await self._give_back()

    async def note(self, key: str, value: str | None) -> None:
        """Sets a note for the successor, or removes it. ClusterError when that cannot be written now."""
        async with self._lock:
            notes = {name: text for name, text in self._record.notes.items() if name != key}
            if value is not None:
                notes[key] = value
            if notes != self._record.notes:
                await self._renew(replace(self._record, notes=notes))

    async def _turn(self) -> None:
        async with self._lock:
            try:
                await self._try()
                self._metrics.succeeded("lease")
            except ApiConflict:
                log.info("lease_contended", lease=self._name)
            except ClusterError as error:
                self._metrics.failed("lease", error)
        _ = self.leading

    async def _try(self) -> None:
        record = await self._cluster.lease(self._name)
        now = self._clock()
        if record.version != self._seen.version:
            self._seen = Sighting(record.version, now)
        if not may_take(record, self._me, self._seen, now):
            self._trusted_until = float("-inf")
            return
        taken = record.holder != self._me
        await self._renew(
            replace(record, holder=self._me, transitions=record.transitions + taken if record.version else 0)
        )

    async def _renew(self, record: LeaseRecord) -> None:
        # Counted from before the call: the others count from when they see it.
        began = self._clock()
        # The API wants six digits after the point, and its client leaves them out where they are all zero.
        now = datetime.datetime.now(datetime.UTC)
        renewed = now.replace(microsecond=max(1, now.microsecond))
        fresh = replace(record, renewed=renewed, seconds=max(1, round(self._seconds)))
        self._record = await self._cluster.write_lease(self._name, fresh)
        self._seen = Sighting(self._record.version, self._clock())
        self._trusted_until = began + self._seconds * _TRUST
        if not self._led:
            self._led = True
            log.info("lease_won", lease=self._name, identity=self._me)
            self._metrics.leader.set(1)
            self.changed.set()

    async def _give_back(self) -> None:
        was, self._trusted_until = self.leading, float("-inf")
        self._led = False
        self._metrics.leader.set(0)
        if not was:
            return
        try:
            await self._cluster.write_lease(self._name, replace(self._record, holder=""))
        except ClusterError as error:
            log.warning("lease_not_released", error=str(error))
