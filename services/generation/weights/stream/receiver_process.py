"""Process that takes part in weight broadcasts for an instance; the first one starts it, silence ends it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc
import structlog

from paceline.errors import parse_details
from services.contracts.errors import ServiceError, Unavailable

_log = structlog.get_logger(__name__)
# The longest line is the report of what was read of each file.
_MOST_LINE = 64 << 20
# It imports torch before it says anything.
_START_SECONDS = 120.0


class ReceiverProcess:
    """One process, which does one broadcast at a time. Its methods run in the event loop."""

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
        """Have it take a broadcast; return its report. `progress` is told positions.

        Cancelled, it kills the process.

        Raises:
            Unavailable: the process died, or was killed because it said nothing for `silence_seconds`.
            ServiceError: the broadcast failed.
        """
        try:
            process = await self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(dict(order)).encode() + b"\n")
            # Until it obeys, it may still be importing torch.
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
        """Kill the process, whatever it does; harmless when there is none."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            # torch and gloo say on stderr what the reports have, with their stacks.
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


def _error(told: Mapping[str, str]) -> ServiceError:
    details = parse_details(base64.b64decode(told["status"]))
    return ServiceError(told["message"], *details, code=grpc.StatusCode[told["code"]])
