"""Where the policy's weights are, version by version, as the gateway publishes them."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis

from services.gateway.keys import GatewayKeys

log = structlog.get_logger(__name__)

_KEPT = 16
"""Versions whose folders are remembered."""


class PolicyFolders:
    """`updating`: an update of the weights is under way."""

    def __init__(self, redis: Redis, namespace: str, model: Path) -> None:
        """`model` is what the fleet starts with, which nobody publishes."""
        self.updating = False
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._model = model
        self._folders: OrderedDict[int, Path] = OrderedDict()

    async def refresh(self) -> None:
        """Looks what is published. Raises what Redis raises."""
        published, update = await self._redis.mget(self._keys.published, self._keys.update)
        self.updating = bool(update)
        if not published:
            return
        try:
            record = json.loads(published)
            version, path = int(record["version"]), str(record["path"])
        except (ValueError, KeyError, TypeError) as error:
            log.warning("published_version_unreadable", error=str(error))
            return
        if path:
            self._folders[version] = Path(path)
            while len(self._folders) > _KEPT:
                self._folders.popitem(last=False)

    def folder(self, version: int) -> Path | None:
        """Of a version; None when it is not known. What is known may be gone."""
        if version in self._folders:
            return self._folders[version]
        # Nothing was published yet: the fleet has what it was started with.
        return self._model if not self._folders or version == 0 else None
