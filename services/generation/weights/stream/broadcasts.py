"""Broadcasts of weights that an instance takes part in."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from paceline.internal.v1.weight_peer_pb2 import PeerWeights
from paceline.times import seconds_of
from services.contracts.errors import FailedPrecondition, Unavailable
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.contents import ShardContent
from services.generation.weights.stream.metrics import TRAINER, WeightStreamMetrics
from services.generation.weights.stream.receiver_process import ReceiverProcess
from services.generation.weights.stream.reception import Received

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Broadcast:
    update_id: str
    version: int
    key: str
    task: asyncio.Task[Received]


class WeightBroadcasts:
    """The broadcast that an instance takes part in, or the last one. Its methods run in the event loop."""

    def __init__(
        self,
        instance_id: str,
        *,
        allowed: bool,
        metrics: WeightStreamMetrics,
        most_bytes: int,
        process: ReceiverProcess | None = None,
    ) -> None:
        self._instance_id = instance_id
        self._allowed = allowed
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._process = process or ReceiverProcess()
        self._current: _Broadcast | None = None

    async def receive(self, version: int, order: PeerWeights, adopted: AdoptedWeights) -> Received:
        """Return the weights of a version once all have come. Called again, it goes on with what has.

        Raises:
            FailedPrecondition: this instance is not set up for broadcasts.
            ServiceError: they cannot be had.
        """
        if not self._allowed:
            text = "weight_collective is off: this instance takes part in no broadcast; set it, or push by stream"
            raise FailedPrecondition("COLLECTIVE_NOT_ALLOWED", text)
        found, described = self._current, order.collective
        same = found is not None and found.update_id == order.update_id
        if found is None or not same or (described.address and described.key != found.key):
            if not described.address:
                raise Unavailable("this instance takes part in no broadcast of this update")
            await self.close()
            work = self._receive(version, order, adopted)
            task = asyncio.create_task(work, name=f"broadcast-{order.update_id}")
            # Its error is not lost where nobody waits for it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            found = self._current = _Broadcast(order.update_id, version, described.key, task)
        # It goes on if this caller goes away.
        try:
            return await asyncio.shield(found.task)
        except asyncio.CancelledError:
            if found.task.cancelled():
                raise Unavailable("the update was given up") from None
            raise

    async def end(self, version: int) -> None:
        """Give up what has not come yet of a version."""
        if self._current is not None and self._current.version == version:
            await self.close()

    async def close(self) -> None:
        """Give up what has not come yet, and the process that waits for it."""
        broadcast, self._current = self._current, None
        if broadcast is not None:
            broadcast.task.cancel()
            await asyncio.wait({broadcast.task})

    async def _receive(self, version: int, order: PeerWeights, adopted: AdoptedWeights) -> Received:
        described = order.collective
        folder = await asyncio.to_thread(adopted.receiving, self._instance_id)
        # What the process itself waits for at most, between two reports.
        silence = seconds_of(described.join) + 5 * seconds_of(described.stall)
        try:
            report = await self._process.receive(
                {
                    "rendezvous": base64.b64encode(described.SerializeToString()).decode(),
                    "instance_id": self._instance_id,
                    "folder": str(folder),
                    "most_bytes": self._most_bytes,
                },
                silence,
                self._counting(),
            )
            checksum: str = report["checksum"]
            place: Path = await asyncio.to_thread(adopted.keep, folder, version, checksum)
        except BaseException as error:
            _log.warning("weights_not_received", version=version, error=str(error) or repr(error))
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
            raise
        contents = {
            tuple(stamp): ShardContent(digest, largest) for stamp, digest, largest in report["contents"]
        }
        return Received(place, checksum, contents)

    def _counting(self) -> Callable[[int], None]:
        """Return a function that counts the bytes up to a position."""
        received, counted = self._metrics.received.labels(TRAINER), 0

        def count(position: int) -> None:
            nonlocal counted
            received.inc(position - counted)
            counted = position

        return count
