"""Servicer of DraftModelService: replaces the EAGLE-3 head of an instance while its engine runs."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import grpc
import structlog
import torch
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.errors import Violation
from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.contracts import drafter_checkpoint
from services.contracts.drafter_checkpoint import CorruptCheckpoint, unlike_current
from services.contracts.errors import FailedPrecondition, InvalidArgument, ServiceError
from services.contracts.learner import read_published
from services.generation.drafters.draft_model import Eagle3Drafter
from services.generation.loop.engine_loop import EngineLoop

_log = structlog.get_logger(__name__)
# A shorter limit would not help: without Redis the instance cannot register either.
_RECALL_SECONDS = 10.0
Context = grpc.aio.ServicerContext[Any, Any]


class DraftModelService(rpc.DraftModelServiceServicer):
    """Checks new heads in full while the engine runs, and swaps them in between two steps."""

    def __init__(self, started_with: Path | None, loop: EngineLoop, drafter: Eagle3Drafter | None) -> None:
        """Serve the head of one engine.

        Args:
            started_with: folder of the head that the engine began with.
            loop: of the engine; it is ready.
            drafter: drafts with the head; None when the instance has no eagle3 drafter.
        """
        self._loop = loop
        self._changing = asyncio.Lock()
        self._version, self._sha256 = 0, ""
        self._drafter = drafter
        self._started_with = started_with
        self._config: dict[str, Any] = {}
        if drafter is not None and started_with is not None:
            self._config = drafter_checkpoint.read_config(started_with)

    async def recall(self, redis: Redis, namespace: str) -> None:
        """Draft with the published head before the first sample arrives.

        If there is none, or it cannot be used, the head that the instance was started with stays.
        """
        if self._drafter is None or self._started_with is None:
            return
        self._sha256 = await asyncio.to_thread(_sha256, self._started_with)
        try:
            async with asyncio.timeout(_RECALL_SECONDS):
                published = await read_published(redis, namespace)
        except (RedisError, TimeoutError) as error:
            _log.warning("drafter_not_recalled", error=str(error))
            return
        if published is None:
            return
        try:
            await self.load(published.version, Path(published.path), published.sha256)
        except ServiceError as error:
            _log.warning("drafter_not_recalled", version=published.version, error=error.message)

    async def load(self, version: int, path: Path, sha256: str) -> int:
        """Draft with another head from the next engine step on; return the version of the previous one.

        Raises:
            InvalidArgument: it is corrupt, or no head for this policy. The head in use stays.
            FailedPrecondition: the instance has no eagle3 drafter.
        """
        drafter = self._required()
        if violations := [*_missing(version, sha256)]:
            raise InvalidArgument(violations)
        async with self._changing:
            before = self._version
            # The number alone does not name a head: a learner that lost its records counts from 1 again.
            if (version, sha256) == (before, self._sha256):
                return before
            try:
                tensors = await asyncio.to_thread(_staged, path, sha256, self._config)
            except InvalidArgument as error:
                drafter.metrics.refused.inc()
                _log.warning("drafter_refused", version=version, path=str(path), error=error.message)
                raise

            def swap() -> None:
                self._loop.ready.result().swap_drafter(drafter.name, tensors)
                drafter.swapped(version)
                self._version, self._sha256 = version, sha256

            await self._loop.execute(swap)
        _log.info("drafter_loaded", version=version, previous=before)
        return before

    async def LoadDraftModel(
        self, request: pb.LoadDraftModelRequest, context: Context
    ) -> pb.LoadDraftModelResponse:
        """Draft with another head from the next engine step on."""
        previous = await self.load(request.drafter_version, Path(request.path), request.sha256)
        return pb.LoadDraftModelResponse(previous_drafter_version=previous)

    async def GetDraftModel(
        self, request: pb.GetDraftModelRequest, context: Context
    ) -> pb.GetDraftModelResponse:
        """Return the head in use, and the outcomes of its drafts."""
        drafter = self._required()

        def look() -> pb.GetDraftModelResponse:
            return pb.GetDraftModelResponse(
                drafter_version=self._version,
                sha256=self._sha256,
                drafts=drafter.compared.drafts,
                draft_tokens=drafter.compared.tokens,
                accepted_tokens=drafter.compared.accepted,
            )

        return await self._loop.execute(look)

    def _required(self) -> Eagle3Drafter:
        if self._drafter is None:
            raise FailedPrecondition("NO_DRAFT_MODEL", "this instance has no eagle3 drafter")
        return self._drafter


def _sha256(folder: Path) -> str:
    with (folder / drafter_checkpoint.WEIGHTS).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _missing(version: int, sha256: str) -> list[Violation]:
    found = []
    if version < 1:
        found.append(Violation("version", f"{version} is not allowed; must be at least 1"))
    if not sha256:
        found.append(Violation("sha256", "is missing"))
    return found


def _staged(path: Path, sha256: str, current: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint that can replace one with the config `current`."""
    try:
        config, tensors = drafter_checkpoint.load(path, sha256)
    except CorruptCheckpoint as error:
        raise InvalidArgument([Violation("path", error.message)]) from error
    if faults := unlike_current(config, current):
        raise InvalidArgument([Violation("path", fault) for fault in faults])
    return tensors
