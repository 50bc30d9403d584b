"""Leader election among controllers by a Lease in Kubernetes.

Clocks of different machines are never compared: a Lease has expired when an observer has not seen it change for its
duration, by the clock of the observer. Its holder stops acting earlier, by its own clock. The election of the
`kubernetes` package is not used: it compares wall-clock times, ends at the first connection error, and neither
releases the Lease nor keeps notes in it.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from services.policy.scaling.errors import ApiConflict, ClusterError
from services.policy.scaling.kubernetes_client import KubernetesClient, LeaseRecord
from services.policy.scaling.metrics import ScalingMetrics

log = structlog.get_logger(__name__)

_RENEW, _TRUST = 1 / 5, 2 / 3
"""Shares of the Lease's duration after which it is renewed, and for which a renewal is relied on."""
_NEVER = float("-inf")


def may_take(record: LeaseRecord, identity: str, unchanged: float) -> bool:
    """Return True if the Lease is ours already, free, or expired after `unchanged` seconds. Pure."""
    return record.holder in ("", identity) or unchanged >= record.seconds


class Election:
    """One candidate. `run` until cancelled; `leading` is True while it may act.

    `notes` are annotations of the Lease, which tell a successor what its predecessor was doing.
    """

    def __init__(
        self,
        cluster: KubernetesClient,
        name: str,
        identity: str,
        seconds: float,
        metrics: ScalingMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._identity = identity
        self._seconds = seconds
        self._metrics = metrics
        self._clock = clock
        self._record = LeaseRecord()
        """The Lease as this candidate wrote it last."""
        self._version, self._changed_at = "", clock()
        self._trusted_until = _NEVER
        self._led = False
        # Serializes cycles of reading, changing and writing back.
        self._lock = asyncio.Lock()

    @property
    def leading(self) -> bool:
        """True while this candidate certainly holds the Lease."""
        leading = self._clock() < self._trusted_until
        if self._led and not leading:
            self._led = False
            log.warning("lease_lost", lease=self._name)
            self._metrics.leader.set(0)
        return leading

    @property
    def notes(self) -> dict[str, str]:
        """Notes in the Lease, as of the last write of this candidate."""
        return dict(self._record.notes)

    async def run(self) -> None:
        """Take the Lease when it is free and renew it; release it when cancelled."""
        try:
            while True:
                async with self._lock:
                    await self._attempt()
                _ = self.leading  # reports a loss
                await asyncio.sleep(self._seconds * _RENEW)
        finally:
            await self._release()

    async def note(self, key: str, value: str | None) -> None:
        """Write a note for the successor, or remove it (None). ClusterError if that fails."""
        async with self._lock:
            notes = {name: text for name, text in self._record.notes.items() if name != key}
            if value is not None:
                notes[key] = value
            if notes != self._record.notes:
                await self._write(replace(self._record, notes=notes))

    async def _attempt(self) -> None:
        try:
            record = await self._cluster.lease(self._name)
            now = self._clock()
            if record.version != self._version:
                self._version, self._changed_at = record.version, now
            if may_take(record, self._identity, now - self._changed_at):
                won = bool(record.version) and record.holder != self._identity
                taken = replace(record, holder=self._identity, transitions=record.transitions + won)
                await self._write(taken)
            else:
                self._trusted_until = _NEVER
            self._metrics.succeeded("lease")
        except ApiConflict:
            log.info("lease_contended", lease=self._name)
        except ClusterError as error:
            self._metrics.failed("lease", error)

    async def _write(self, record: LeaseRecord) -> None:
        # Counted from before the call: other candidates count from when they see the change.
        began = self._clock()
        # The API requires six digits after the point, and its client omits them when they are all zero.
        now = datetime.datetime.now(datetime.UTC)
        renewed = now.replace(microsecond=max(1, now.microsecond))
        fresh = replace(record, renewed=renewed, seconds=max(1, round(self._seconds)))
        self._record = await self._cluster.write_lease(self._name, fresh)
        self._version, self._changed_at = self._record.version, self._clock()
        self._trusted_until = began + self._seconds * _TRUST
        if not self._led:
            self._led = True
            log.info("lease_won", lease=self._name, identity=self._identity)
            self._metrics.leader.set(1)

    async def _release(self) -> None:
        held, self._trusted_until, self._led = self.leading, _NEVER, False
        self._metrics.leader.set(0)
        if held:
            try:
                await self._cluster.write_lease(self._name, replace(self._record, holder=""))
            except ClusterError as error:
                log.warning("lease_not_released", error=str(error))
