"""Pre-generation for as long as an instance serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.generation.config import GenerationConfig
from services.generation.instance import Instance
from services.generation.pregeneration.coordinator import Coordinator
from services.generation.pregeneration.metrics import PregenerationMetrics
from services.generation.pregeneration.puts import PutQueue, RolloutStore
from services.generation.pregeneration.seat import Seat
from services.generation.pregeneration.worker import Pregenerator
from services.platform.registry import Registry
from services.platform.tasks import end


@asynccontextmanager
async def pregenerating(
    config: GenerationConfig,
    instance: Instance,
    store: RolloutStore,
    registry: Registry,
    metrics: PregenerationMetrics,
) -> AsyncIterator[Pregenerator]:
    """Let a registered instance pre-generate until the context is left."""
    instance.loop.background.metrics = metrics
    metrics.watch_sleep(lambda: instance.loop.asleep)
    seat = Seat(config, instance.epoch, instance.loop, instance.terms, instance.intake.fetcher)
    made = Pregenerator(seat, Coordinator(config, registry), PutQueue(store, metrics), metrics)
    instance.pregenerator = made
    running = asyncio.create_task(made.run(), name="pregenerate")
    try:
        yield made
    finally:
        await end([running])
