"""Folders of the policy's weights by version, as the gateway publishes them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio import Redis

from paceline.foreign_json import parse_object
from services.contracts.gateway_keys import GatewayKeys

log = structlog.get_logger(__name__)

_MAX_FOLDERS = 16
"""Most versions whose folders are remembered."""


class PolicyFolders:
    """Model folders of the latest policy versions. `updating`: a weight update is under way."""

    def __init__(self, redis: Redis, namespace: str, model: Path) -> None:
        """Start with `model`, which the instances start with and nobody publishes."""
        self.updating = False
        self._redis: Any = redis
        self._keys = GatewayKeys(namespace)
        self._model = model
        self._folders: OrderedDict[int, Path] = OrderedDict()

    async def refresh(self) -> None:
        """Read the published version. Raises what Redis raises."""
        published, update = await self._redis.mget(self._keys.published, self._keys.update)
        self.updating = bool(update)
        if not published:
            return
        try:
            record = parse_object(published)
            version, path = int(record["version"]), str(record["path"])
        except (ValueError, KeyError, TypeError) as error:
            log.warning("published_version_unreadable", error=str(error))
            return
        if path:
            self._folders[version] = Path(path)
            while len(self._folders) > _MAX_FOLDERS:
                self._folders.popitem(last=False)

    def folder(self, version: int) -> Path | None:
        """Return the folder of a version, None if it is not known. The trainer may have removed the folder."""
        if version in self._folders:
            return self._folders[version]
        # While nothing was published, the instances have the weights they started with.
        return self._model if not self._folders or version == 0 else None
