"""Broadcasts of weights that an instance takes part in, and the process that receives them.

The process starts with the first broadcast, and is killed after a silence (see `broadcast_receiver` for its
program).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from paceline.errors import parse_details
from paceline.internal.v1.weight_peer_pb2 import PeerWeights
from paceline.times import seconds_of
from services.contracts.errors import FailedPrecondition, ServiceError, Unavailable
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.files import FileContent
from services.generation.weights.stream.metrics import TRAINER, WeightStreamMetrics
from services.generation.weights.stream.reception import Received

_log = structlog.get_logger(__name__)
# The longest line is the report of the contents of each file.
_MOST_LINE = 64 << 20
# Time to import torch before the first report.
_START_SECONDS = 120.0


class ReceiverProcess:
    """Process that receives one broadcast at a time. Its methods run in the event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while the process lives."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and alive else None

    async def receive(
        self, order: Mapping[str, Any], silence_seconds: float, progress: Callable[[int], None]
    ) -> dict[str, Any]:
        """Receive a broadcast in the process, and return its report; `progress` is called with positions.

        A cancellation kills the process.

        Raises:
            Unavailable: the process died, or was killed because it reported nothing for `silence_seconds`.
            ServiceError: the broadcast failed.
        """
        try:
            process = await self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(dict(order)).encode() + b"\n")
            # Before its first report it may still be importing torch.
            limit = silence_seconds + _START_SECONDS
            while True:
                report = await self._report(process, limit)
                limit = silence_seconds
                if "position" in report:
                    progress(int(report["position"]))
                elif "error" in report:
                    raise _error(report["error"])
                else:
                    whole: dict[str, Any] = report["whole"]
                    return whole
        except ServiceError:
            raise
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            # torch and gloo would write the errors that the reports have to stderr, with their stacks.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.generation.weights.stream.broadcast_receiver",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=_MOST_LINE,
            )
            _log.info("weight_receiver_started", pid=self._process.pid)
        return self._process

    async def _report(self, process: asyncio.subprocess.Process, limit: float) -> dict[str, Any]:
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), limit)
        except TimeoutError:
            await self.stop()
            raise Unavailable(
                f"the rank of the broadcast said nothing for {limit:g} s, and was killed"
            ) from None
        if not line:
            status = await process.wait()
            raise Unavailable(f"the rank of the broadcast ended with status {status}")
        report: dict[str, Any] = json.loads(line)
        return report


def _error(report: Mapping[str, str]) -> ServiceError:
    details = parse_details(base64.b64decode(report["status"]))
    return ServiceError(report["message"], *details, code=grpc.StatusCode[report["code"]])


@dataclass(frozen=True, slots=True, eq=False)
class _Broadcast:
    update_id: str
    version: int
    key: str
    task: asyncio.Task[Received]


class WeightBroadcasts:
    """Present or last broadcast that an instance takes part in. Its methods run in the event loop."""

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
        """Return the weights of a version once all have arrived; a repeated call continues the reception.

        Raises:
            FailedPrecondition: this instance is not set up for broadcasts.
            ServiceError: they cannot be received.
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
            # Read its error, which asyncio would otherwise log as never retrieved.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            found = self._current = _Broadcast(order.update_id, version, described.key, task)
        # It continues if this caller disconnects.
        try:
            return await asyncio.shield(found.task)
        except asyncio.CancelledError:
            if found.task.cancelled():
                raise Unavailable("the update was given up") from None
            raise

    async def end(self, version: int) -> None:
        """Give up the broadcast of a version, if it is in progress."""
        if self._current is not None and self._current.version == version:
            await self.close()

    async def close(self) -> None:
        """Give up the broadcast, and the process that receives it."""
        broadcast, self._current = self._current, None
        if broadcast is not None:
            broadcast.task.cancel()
            await asyncio.wait({broadcast.task})

    async def _receive(self, version: int, order: PeerWeights, adopted: AdoptedWeights) -> Received:
        described = order.collective
        folder = await asyncio.to_thread(adopted.receiving, self._instance_id)
        # Longest time that the process itself waits between two reports.
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
            tuple(stamp): FileContent(digest, largest) for stamp, digest, largest in report["contents"]
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
