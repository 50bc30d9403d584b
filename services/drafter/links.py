"""The way to one instance: sees to it that it drafts with what is published, and asks what becomes of the
drafts."""

from __future__ import annotations

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
from services.platform.link import Link
from services.platform.pulse import Pulse
from services.platform.registry import InstanceRecord

log = structlog.get_logger(__name__)

# Deadline of a question, and the pause between questions to an instance that has no drafter.
_CALL_SECONDS, _WITHOUT_SECONDS = 2.0, 30.0
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


class DrafterLink(Link):
    """One process of an instance. `version` and `live` are what it last said."""

    def __init__(
        self, record: InstanceRecord, config: DrafterConfig, source: Source, metrics: DrafterMetrics
    ) -> None:
        super().__init__(record, config, source.changed, metrics.loads.labels("failed"))
        self.stand = Stand.BEHIND
        self.version = 0
        self.live = Live()
        self._config = config
        self._source = source
        self._metrics = metrics
        self._refused: Published | None = None
        self._stub: Any = rpc.DraftModelServiceStub(self._channel)

    async def call(self) -> float:
        """Asks, and loads what is published where it is not; seconds until it is asked again."""
        try:
            said = await self._stub.GetDraftModel(pb.GetDraftModelRequest(), timeout=_CALL_SECONDS)
            self._hear(said)
            wanted = self._source.published
            if wanted is None or (said.version, said.sha256) == (wanted.version, wanted.sha256):
                self.stand = Stand.CURRENT
            elif wanted != self._refused:
                await self._load(wanted)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_DRAFTER:
                raise
            self.stand = Stand.WITHOUT
            return _WITHOUT_SECONDS
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
