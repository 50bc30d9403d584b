"""The eagle3 head of an instance: which one drafts, and another in its place while the engine runs."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.drafter import checkpoint
from services.drafter.checkpoint import CorruptCheckpoint
from services.drafter.record import read_published
from services.generation.config import GenerationConfig
from services.generation.drafting.eagle3_form import unlike_current
from services.generation.drafting.own_model import Compared, OwnModelDrafter
from services.generation.engine.types import EAGLE3
from services.generation.instance import Instance
from services.generation.metrics import EngineMetrics
from services.platform.errors import FailedPrecondition, InvalidArgument, ServiceError
from services.platform.store import Keys
from services.platform.violations import Violation

_log = structlog.get_logger(__name__)
_RECALL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class InUse:
    """The head that drafts, and what became of its drafts since it does. Version 0: it was started with."""

    version: int
    sha256: str
    compared: Compared


class DraftModels:
    """Takes heads in, checks them in full beside the running engine, and puts them into it between two steps."""

    def __init__(self, config: GenerationConfig, instance: Instance, metrics: EngineMetrics) -> None:
        self._loop = instance.loop
        self._metrics = metrics.eagle3
        self._changing = asyncio.Lock()
        self._version, self._sha256 = 0, ""
        self._engine: Any = instance.loop.ready.result()
        self._drafter: OwnModelDrafter | None = instance.own_models.get(EAGLE3)
        self._started_with = config.eagle3
        self._config: dict[str, Any] = {}
        if self._drafter is not None and config.eagle3 is not None:
            self._config = checkpoint.read_config(config.eagle3)

    async def recall(self, redis: Redis, keys: Keys) -> None:
        """Draft with the head that is published, before the first sample comes. Without one, or where it cannot be
        used, with the one that the instance was started with."""
        if self._drafter is None or self._started_with is None:
            return
        self._sha256 = await asyncio.to_thread(_sha256, self._started_with)
        try:
            async with asyncio.timeout(_RECALL_SECONDS):
                published = await read_published(redis, keys)
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
        """Draft with another head from the next engine step on; the version that did so far.

        Raises:
            InvalidArgument: it is broken, or not of a drafter for this policy. The one in use stays.
            FailedPrecondition: the instance has no eagle3 drafter.
        """
        drafter = self._required()
        if violations := [*_missing(version, sha256)]:
            raise InvalidArgument(violations)
        async with self._changing:
            before = self._version
            if version == before:
                return before
            try:
                tensors = await asyncio.to_thread(_staged, path, sha256, self._config)
            except InvalidArgument as error:
                self._metrics.refused.inc()
                _log.warning("drafter_refused", version=version, path=str(path), error=error.message)
                raise

            def swap() -> None:
                self._engine.swap_drafter(EAGLE3, tensors)
                drafter.swapped(version)
                self._version, self._sha256 = version, sha256

            await asyncio.wrap_future(self._loop.call(swap))
        _log.info("drafter_loaded", version=version, previous=before)
        return before

    async def in_use(self) -> InUse:
        """The head that drafts.

        Raises:
            FailedPrecondition: the instance has no eagle3 drafter.
        """
        drafter = self._required()

        def look() -> InUse:
            return InUse(self._version, self._sha256, replace(drafter.compared))

        return await asyncio.wrap_future(self._loop.call(look))

    def _required(self) -> OwnModelDrafter:
        if self._drafter is None:
            raise FailedPrecondition("NO_DRAFT_MODEL", "this instance has no eagle3 drafter")
        return self._drafter


def _sha256(folder: Path) -> str:
    with (folder / checkpoint.WEIGHTS).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _missing(version: int, sha256: str) -> list[Violation]:
    found = []
    if version < 1:
        found.append(Violation("version", f"{version} is not allowed; must be at least 1"))
    if not sha256:
        found.append(Violation("sha256", "is missing"))
    return found


def _staged(path: Path, sha256: str, current: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that can take the place of one with the config `current`."""
    try:
        config, tensors = checkpoint.load(path, sha256)
    except CorruptCheckpoint as error:
        raise InvalidArgument([Violation("path", error.message)]) from error
    if faults := unlike_current(config, current):
        raise InvalidArgument([Violation("path", fault) for fault in faults])
    return tensors
