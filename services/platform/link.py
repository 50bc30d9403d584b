"""The way to one process of another service: calls it again and again."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import grpc
import structlog
from prometheus_client import Counter

from services.platform.channel import open_channel
from services.platform.config import ServiceConfig
from services.platform.pulse import Pulse
from services.platform.registry import InstanceRecord

log = structlog.get_logger(__name__)

# Pause after a round that failed, doubling with each in a row.
_PAUSE, _PAUSE_MOST = 0.1, 2.0


class Link(ABC):
    """One process, called in rounds (`call`). `run` until cancelled."""

    def __init__(
        self, record: InstanceRecord, config: ServiceConfig, changed: Pulse, failures: Counter
    ) -> None:
        """A beat of `changed` begins a round at once; `failures` counts rounds that failed.

        ValueError when the token would travel to the process in plain text.
        """
        self.record = record
        self._channel = open_channel(record.address, config)
        self._changed = changed
        self._failures = failures
        self._failed_in_a_row = 0

    @abstractmethod
    async def call(self) -> float:
        """One round of calls; seconds until the next one. What calls raise makes it a failed one."""

    async def run(self) -> None:
        """Keeps the process up to date until cancelled."""
        try:
            while True:
                # Marked before the look, so that no change is missed.
                mark = self._changed.mark()
                pause = await self._once()
                try:
                    async with asyncio.timeout(pause):
                        await mark.wait()
                except TimeoutError:
                    continue
        finally:
            await self._channel.close()

    async def _once(self) -> float:
        try:
            pause = await self.call()
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        self._failed_in_a_row = 0
        return pause

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        self._failures.inc()
        if self._failed_in_a_row == 0:
            log.warning(
                "instance_unreachable",
                instance=self.record.instance_id,
                error=f"{error.code().name}: {error.details()}",
            )
        pause = min(_PAUSE * 2 ** min(self._failed_in_a_row, 16), _PAUSE_MOST)
        self._failed_in_a_row += 1
        return pause
