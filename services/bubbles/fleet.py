"""Watches which generation instances live and how many samples of a step each has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from services.platform.registry import InstanceRecord, Registry
from services.platform.store import OUTAGES

log = structlog.get_logger(__name__)

SERVICE = "generation"
# As often as instances write their records.
_INTERVAL = 1.0


async def watch(registry: Registry, tell: Callable[[Mapping[str, int]], None]) -> None:
    """Tells what the registry shows, once a second, until cancelled. In an outage nothing is told: what was told
    last is the best guess."""
    task = asyncio.current_task()
    readable = True
    # A cancellation that lands inside a Redis command can get lost, hence the question.
    while task is not None and not task.cancelling():
        try:
            records = await registry.list(SERVICE)
        except OUTAGES as error:
            if readable:
                log.warning("registry_unreachable", error=str(error))
            readable = False
        else:
            readable = True
            tell({instance_id: _samples(record) for instance_id, record in records.items()})
        await asyncio.sleep(_INTERVAL)


def _samples(record: InstanceRecord) -> int:
    load = record.load
    return int(load.get("running", 0)) + int(load.get("waiting", 0))
