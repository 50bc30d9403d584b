"""Track the registered instances by polling their status, each with a throughput curve."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from paceline.internal.v1 import generation_pb2, generation_pb2_grpc, migration_pb2, migration_pb2_grpc
from paceline.v1 import fleet_pb2
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.redis.registry import INSTANCES, InstanceRecord, Registry
from services.platform.tasks import is_cancelled
from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.throughput import (
    Architecture,
    InstanceReport,
    Roofline,
    StepTime,
    UnsupportedArchitecture,
    architecture_of,
)

log = structlog.get_logger(__name__)

# Architecture of an unreadable model: small, so that measured steps soon dominate.
_UNKNOWN = Architecture(weight_bytes=1e8, kv_bytes=1e4, dense_flops=1e8, attention_flops=1e4)


class Rooflines:
    """Throughput curves of instances, one per model and device, which start from a step-time model.

    Equal instances share a curve, so that each measurement counts for all of them and noise does not make them
    differ.
    """

    def __init__(self, config: ReallocatorConfig) -> None:
        self._config = config
        self._warned: set[str] = set()
        self._shared: dict[tuple[str, str, int], Roofline] = {}

    def __call__(self, record: InstanceRecord) -> Roofline:
        kind = (record.model, record.device, record.max_running)
        if kind not in self._shared:
            self._shared[kind] = Roofline(
                self._model(record.model).seconds, record.max_running, self._config.flatness
            )
        return self._shared[kind]

    def _model(self, model: str) -> StepTime:
        try:
            return StepTime(architecture=architecture_of(Path(model), self._config.dtype))
        except UnsupportedArchitecture as error:
            if model not in self._warned:
                log.warning("no_step_time_model", reason=str(error))
            self._warned.add(model)
            return StepTime(architecture=_UNKNOWN)


CALL_SECONDS = 1.0
"""Deadline of a status or listing request to an instance."""
_REPORTS = 64
# Most seconds between two reads of the registry, including calls to instances that do not answer.
_LONGEST_GAP = 3.0


class Unanswered(Exception):
    """Error of a call without an answer; the message is the gRPC status in lower case."""


async def answered(call: Awaitable[Any]) -> Any:
    """Return the answer of a call. Unanswered if there is none, also when the channel is closed under the call."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise Unanswered(error.code().name.lower()) from error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise Unanswered("closed") from error


@dataclass(slots=True, eq=False)
class PolledInstance:
    """One process of an instance. `status` is its last answer, None if it did not answer."""

    record: InstanceRecord
    channel: grpc.aio.Channel
    roofline: Roofline
    status: fleet_pb2.Instance | None = None
    # The last reports, oldest first; cleared when it does not answer.
    reports: deque[InstanceReport] = field(default_factory=lambda: deque(maxlen=_REPORTS))
    # Time up to which its reports have been learned from.
    learned_at: float = float("-inf")
    # Mean tokens of its samples, prompts included, when they were last listed, or else of instances of its model.
    context: float = 1.0
    generation: Any = field(init=False)
    migration: Any = field(init=False)

    def __post_init__(self) -> None:
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.migration = migration_pb2_grpc.MigrationServiceStub(self.channel)

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def samples(self) -> int:
        """Number of samples on it, by its last answer, without background work."""
        return 0 if self.status is None else self.status.load.running + self.status.load.waiting

    def is_in(self, state: fleet_pb2.InstanceState) -> bool:
        """Return True if it has answered and is in this state."""
        return self.status is not None and self.status.state == state

    async def list_samples(self) -> migration_pb2.ListSamplesResponse | None:
        """Return its samples and free room; None if it does not answer."""
        request = migration_pb2.ListSamplesRequest()
        try:
            return await answered(self.migration.ListSamples(request, timeout=CALL_SECONDS))
        except Unanswered as error:
            log.debug("samples_not_listed", instance=self.instance_id, reason=str(error))
            return None


class PolledInstances:
    """All registered instances, by id. `roofline` makes the throughput curve of a new one."""

    def __init__(
        self, config: ServiceConfig, registry: Registry, roofline: Callable[[InstanceRecord], Roofline]
    ) -> None:
        self.known: dict[str, PolledInstance] = {}
        self._config = config
        self._present = registry.present(INSTANCES, _LONGEST_GAP)
        self._roofline = roofline
        self._not_dialled: set[str] = set()
        self._read_at = float("-inf")

    async def refresh(self, registry_seconds: float = 0.0) -> None:
        """Poll every instance, and read the registry if that was `registry_seconds` ago.

        Known instances stay known in an outage of Redis, and after it until they could register again.
        """
        now = time.monotonic()
        if now - self._read_at >= registry_seconds:
            self._read_at = now
            records = await self._present.read()
            if records is not None:
                await self._update(records)
        await asyncio.gather(*map(self._poll, self.known.values()))

    async def close(self) -> None:
        """Close all connections."""
        await self._update({})

    async def _update(self, records: dict[str, InstanceRecord]) -> None:
        for name, member in list(self.known.items()):
            if name not in records or records[name].epoch != member.record.epoch:
                del self.known[name]
                await member.channel.close()
        self._not_dialled &= {record.address for record in records.values()}
        for name, record in records.items():
            if name in self.known:
                self.known[name].record = record
            elif (channel := self._open(record)) is not None:
                self.known[name] = PolledInstance(record, channel, self._roofline(record))

    def _open(self, record: InstanceRecord) -> grpc.aio.Channel | None:
        try:
            return open_channel(record.address, self._config)
        except ValueError as error:
            # The token may not be sent there. That is a mistake in the configuration, and does not pass.
            if record.address not in self._not_dialled:
                log.error("instance_not_dialled", address=record.address, error=str(error))
            self._not_dialled.add(record.address)
            return None

    async def _poll(self, member: PolledInstance) -> None:
        request = generation_pb2.GetStatusRequest()
        try:
            answer = await answered(member.generation.GetStatus(request, timeout=CALL_SECONDS))
        except Unanswered:
            member.status = None
            member.reports.clear()
            return
        # The address of a dead process may belong to another one now.
        found = answer.instance
        same = (found.instance_id, found.epoch) == (member.instance_id, member.record.epoch)
        member.status = found if same else None
        if member.status is not None:
            load = member.status.load
            member.reports.append(
                InstanceReport(time.monotonic(), member.samples, load.steps, load.generated_tokens)
            )
