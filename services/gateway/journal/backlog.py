"""Ended samples that Redis has not taken: their bytes in memory, and the pause while these are too many."""

from __future__ import annotations

import structlog

from services.contracts.errors import ResourceExhausted
from services.gateway.metrics import GatewayMetrics
from services.platform.notify import Notifier

log = structlog.get_logger(__name__)

_RETRY_AFTER = 5.0


class JournalBacklog:
    """Bytes of ended samples that are not in the journal, as its writer counts them.

    Above `most_bytes` the gateway gives instances nothing and takes nothing from them, until no more than half of
    that waits: what they generate meanwhile stays with them.
    """

    def __init__(self, most_bytes: int, metrics: GatewayMetrics) -> None:
        self.nbytes = 0
        self.paused = False
        self.changed = Notifier()
        """Notified when a pause begins or ends."""
        self._most_bytes = most_bytes
        metrics.unwritten.set_function(lambda: self.nbytes / most_bytes)
        metrics.paused.set_function(lambda: self.paused)

    def add(self, nbytes: int) -> None:
        """Count bytes more, or less."""
        if not nbytes:
            return
        self.nbytes += nbytes
        paused = self.nbytes > (self._most_bytes // 2 if self.paused else self._most_bytes)
        if paused != self.paused:
            self.paused = paused
            log.warning("instances_paused" if paused else "instances_resumed", unwritten_bytes=self.nbytes)
            self.changed.notify()

    def check(self) -> None:
        """Check that work may go on. ResourceExhausted in a pause."""
        if self.paused:
            raise ResourceExhausted(
                "unwritten_bytes",
                f"{self.nbytes} bytes of finished samples wait for Redis; new batches are accepted when half of "
                f"{self._most_bytes} are left",
                retry_after=_RETRY_AFTER,
            )

    def clear(self) -> None:
        """Forget what was counted: the term is over."""
        self.add(-self.nbytes)
