"""Watches which generation instances live and how many samples of a step each has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from services.platform.registry import INSTANCES, InstanceRecord, Registry

# As often as instances write their records.
_INTERVAL = 1.0


async def watch(registry: Registry, tell: Callable[[Mapping[str, int]], None]) -> NoReturn:
    """Tells what the registry shows, once a second, until cancelled. In an outage nothing is told: what was told
    last is the best guess."""

    async def look(records: dict[str, InstanceRecord] | None) -> None:
        if records is not None:
            tell({instance_id: record.samples for instance_id, record in records.items()})

    await registry.watch(INSTANCES, _INTERVAL, look)
