"""The way to one instance: sees to it that it drafts with what is published, and asks what becomes of the
drafts."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Any, Protocol

import grpc
import structlog

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.drafter.canary import Live
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.drafter.record import Published
from services.gateway.pulse import Pulse
from services.platform.channel import open_channel
from services.platform.registry import InstanceRecord

log = structlog.get_logger(__name__)

# Pause after a call that failed, doubling with each in a row; and between questions to one that has no drafter.
_PAUSE, _PAUSE_MOST, _WITHOUT = 0.1, 2.0, 30.0
_CALL_SECONDS = 2.0
_NO_DRAFTER = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)
# Answers that say that the checkpoint is at fault. They stay what they are until there is another one.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS)


class Stand(StrEnum):
    """How an instance stands to the published drafter."""

    BEHIND = "behind"
    CURRENT = "current"
    REFUSED = "refused"
    WITHOUT = "without"
    """It has no drafter of this kind."""


class Source(Protocol):
    """What instances are to draft with."""

    changed: Pulse

    @property
    def published(self) -> Published | None: ...


class Link:
    """One process of an instance. `run` until cancelled. `version` and `live` are what it last said."""

    def __init__(
        self, record: InstanceRecord, config: DrafterConfig, source: Source, metrics: DrafterMetrics
    ) -> None:
        """ValueError when the token would travel to the instance in plain text."""
        self.record = record
        self.stand = Stand.BEHIND
        self.version = 0
        self.live = Live()
        self._config = config
        self._source = source
        self._metrics = metrics
        self._refused: Published | None = None
        self._failures = 0
        self._channel = open_channel(record.address, config)
        self._stub: Any = rpc.DraftModelServiceStub(self._channel)

    async def run(self) -> None:
        """Keeps the instance up to date until cancelled."""
        try:
            while True:
                # Marked before the look, so that no change is missed.
                mark = self._source.changed.mark()
                pause = await self._once()
                try:
                    async with asyncio.timeout(pause):
                        await mark.wait()
                except TimeoutError:
                    continue
        finally:
            await self._channel.close()

    async def _once(self) -> float:
        """One round; the seconds until the next, unless there is something new before."""
        try:
            said = await self._stub.GetDraftModel(pb.GetDraftModelRequest(), timeout=_CALL_SECONDS)
            self._hear(said)
            wanted = self._source.published
            if wanted is None or (said.version, said.sha256) == (wanted.version, wanted.sha256):
                self.stand = Stand.CURRENT
            elif wanted != self._refused:
                await self._load(wanted)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NO_DRAFTER:
                self.stand = Stand.WITHOUT
                return _WITHOUT
            return self._failed(error)
        self._failures = 0
        return self._config.report_seconds

    def _hear(self, said: pb.GetDraftModelResponse) -> None:
        self.version = said.version
        self.live = Live(said.drafts, said.draft_tokens, said.accepted_tokens)

    async def _load(self, wanted: Published) -> None:
        self.stand = Stand.BEHIND
        request = pb.LoadDraftModelRequest(version=wanted.version, path=wanted.path, sha256=wanted.sha256)
        try:
            await self._stub.LoadDraftModel(request, timeout=self._config.load_timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                raise
            self._refused, self.stand = wanted, Stand.REFUSED
            self._metrics.loads.labels("refused").inc()
            log.error(
                "drafter_refused",
                instance=self.record.instance_id,
                version=wanted.version,
                error=error.details(),
            )
            return
        self._refused, self.stand = None, Stand.CURRENT
        self.version, self.live = wanted.version, Live()
        self._metrics.loads.labels("loaded").inc()
        log.info("drafter_loaded", instance=self.record.instance_id, version=wanted.version)

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        self._metrics.loads.labels("failed").inc()
        if self._failures == 0:
            log.warning(
                "instance_unreachable",
                instance=self.record.instance_id,
                error=f"{error.code().name}: {error.details()}",
            )
        pause = min(_PAUSE * 2 ** min(self._failures, 16), _PAUSE_MOST)
        self._failures += 1
        return pause
