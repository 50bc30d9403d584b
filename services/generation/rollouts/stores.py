"""The draft store for as long as an instance lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.drafts.client import DraftStores
from services.platform.config import ServiceConfig
from services.platform.registry import Registry
from services.platform.tasks import end


@asynccontextmanager
async def watched_stores(
    config: ServiceConfig, registry: Registry, call_seconds: float
) -> AsyncIterator[DraftStores]:
    """The store's replicas, looked for in the registry until the context is left; a call has `call_seconds`."""
    stores = DraftStores(config, registry, timeout=call_seconds)
    watching = asyncio.create_task(stores.run())
    try:
        yield stores
    finally:
        await end([watching])
        await stores.close()
