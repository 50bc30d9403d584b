"""A coordinator process, and a scripted gateway and instances that talk to it over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registry
from tests.support.clocked_coordinator import CLOCK_FILE, HOUR
from tests.support.zygote import Forked, forked

CALL = 60.0
"""Deadline of every call and every wait, in seconds: far above what anything takes."""
ROLLOUT, UPDATE, APPLYING = pb.RUN_PHASE_ROLLOUT, pb.RUN_PHASE_UPDATE, pb.RUN_PHASE_APPLYING


class Coordinator:
    """`python -m services.bubbles`; may be killed and started again.

    A `clocked` one is that of tests.support.clocked_coordinator, with leases so long that it does nothing by itself
    unless `lease_seconds` is given.
    """

    def __init__(
        self, redis_url: str, namespace: str, folder: Path, *, clocked: bool = False, **settings: Any
    ) -> None:
        self._module = "tests.support.clocked_coordinator" if clocked else "services.bubbles"
        self._clock = folder / "clock"
        self.now = 1e9
        if clocked:
            settings = {"lease_seconds": 4 * HOUR, **settings}
            self._clock.touch()
            self.advance(0.0)
        self._ready_file = folder / "ready.json"
        self._log = folder / "bubbles.log"
        given = {"port": 0, "instance-id": "bubbles-0", "redis-url": redis_url, "namespace": namespace}
        given |= {"ready-file": self._ready_file}
        given |= {name.replace("_", "-"): value for name, value in settings.items()}
        self._flags = [_flag(name, value) for name, value in given.items()]
        self._process: Forked | None = None
        self._channel: grpc.aio.Channel | None = None
        self.metrics_port = 0
        self.stub: Any

    async def start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", self._module, *self._flags]
            environment = {**os.environ, CLOCK_FILE: str(self._clock)}
            self._process = await asyncio.to_thread(forked, command, environment, log)
        async with asyncio.timeout(CALL):
            while not self._ready_file.exists():
                assert self._process.poll() is None, self._log.read_text()
                await asyncio.sleep(0.01)
        ready = json.loads(self._ready_file.read_text())
        self.metrics_port = ready["metrics_port"]
        self._channel = grpc.aio.insecure_channel(ready["address"])
        self.stub = rpc.BubbleServiceStub(self._channel)

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._channel is not None:
            await self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """End it as an operator does; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(CALL)

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name and labels."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def advance(self, seconds: float) -> None:
        """Set the clock of a clocked coordinator forward."""
        self.now += seconds
        os.utime(self._clock, (self.now, self.now))

    # As a gateway ---------------------------------------------------------------------------------------

    async def tell(
        self,
        phase: int = ROLLOUT,
        *,
        hints: Sequence[pb.PutHintRequest] = (),
        run_id: str = "run",
        **fields: Any,
    ) -> list[str]:
        """SetRun, and PutHint for each hint that is missing, as a gateway does; the ids that were missing."""
        hint_ids = [hint.hint_id for hint in hints]
        request = pb.SetRunRequest(run_id=run_id, phase=phase, hint_ids=hint_ids, **fields)
        response = await self.stub.SetRun(request, timeout=CALL)
        for hint in hints:
            if hint.hint_id in response.missing_hint_ids:
                await self.stub.PutHint(hint, timeout=CALL)
        return list(response.missing_hint_ids)

    async def coverage(self, step: int = 1) -> dict[tuple[str, int], tuple[int, bool]]:
        request = pb.GetCoverageRequest(run_id="run", step=step)
        response = await self.stub.GetCoverage(request, timeout=CALL)
        return {(each.prompt_id, each.slot): (each.tokens, each.finished) for each in response.slots}


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


class Poller:
    """An instance as the coordinator sees it."""

    def __init__(self, coordinator: Coordinator, name: str, *, epoch: int = 1, room: int = 100) -> None:
        self.name, self.epoch, self.room = name, epoch, room
        self.coordinator_epoch = 0
        self._coordinator = coordinator

    async def poll(
        self, progress: Iterable[pb.PregenerationProgress] = (), **fields: Any
    ) -> pb.PollWorkResponse:
        request = pb.PollWorkRequest(
            instance_id=self.name,
            epoch=self.epoch,
            room=fields.pop("room", self.room),
            progress=progress,
            coordinator_epoch=self.coordinator_epoch,
            **fields,
        )
        response = await self._coordinator.stub.PollWork(request, timeout=CALL)
        self.coordinator_epoch = response.coordinator_epoch
        return response


@pytest.fixture
async def coordinate(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await coordinate(**settings)` starts a coordinator that ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Coordinator:
            coordinator = Coordinator(redis_url, namespace, tmp_path, **settings)
            stack.push_async_callback(coordinator.kill)
            await coordinator.start()
            return coordinator

        yield start


async def registered(redis_url: str, namespace: str) -> dict[str, InstanceRecord]:
    """Return the coordinators in the registry."""
    config = ServiceConfig(redis_url=redis_url, namespace=namespace)
    async with connect(config) as redis:
        return await Registry(redis, Keys(namespace)).list("bubbles")


def make_hint(step: int = 1, groups: int = 2, slots: int = 2, name: str = "") -> pb.PutHintRequest:
    """Return a hint of run "run"."""
    return pb.PutHintRequest(
        run_id="run",
        hint_id=name or f"hint-{step}",
        step=step,
        groups=[
            pb.HintedGroup(
                prompt_id=f"p{number}",
                prompt_token_ids=[1, 2, 3 + number],
                seeds=[1000 * step + 10 * number + slot for slot in range(slots)],
                expected_tokens=100.0 - number,
            )
            for number in range(groups)
        ],
    )


def progress(
    items: Iterable[pb.PregenerationTask], tokens: int = 0, *, finished: bool = False, returned: bool = False
) -> list[pb.PregenerationProgress]:
    """Return a report of items."""
    return [
        pb.PregenerationProgress(lease=item.lease, tokens=tokens, finished=finished, returned=returned)
        for item in items
    ]
