"""Start an instance: `python -m services.generation --model DIR --redis-url URL`."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from contextlib import AsyncExitStack, suppress

import structlog
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from services.contracts.errors import Unavailable
from services.generation.build import GenerationProcess, build
from services.generation.config import GenerationConfig
from services.platform.memory import keep_freed_memory
from services.platform.redis.connection import OUTAGES, connect
from services.platform.service import Shutdown, begun, run
from services.platform.tasks import end, is_cancelled, until_one_ends
from services.step_time.machine import on_cpu

_log = structlog.get_logger(__name__)
_HEARTBEAT_SECONDS = 1.0
# Longest time that the engine's thread keeps the interpreter while another thread wants it. Python's default of 5
# ms is more than a step of a small model, and a moved sample waits for several such hand-overs while it is paused.
_SWITCH_SECONDS = 0.0005


async def serve(config: GenerationConfig, shutdown: Shutdown) -> None:
    """Load the model, then serve until the process is to stop or the engine breaks."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    if on_cpu():
        keep_freed_memory()
    async with connect(config) as redis, AsyncExitStack() as stack:
        # Importing vLLM makes very many objects that stay; collections that traverse them take a fifth of its time.
        gc.disable()
        process = await _built(config, redis, shutdown)
        gc.enable()
        # Later collections, often in the thread that steps the engine, need not traverse them either.
        gc.freeze()
        server, registration = process.server, process.registration
        await server.start()
        registration.reachable = server.set_store
        await registration.update(
            address=server.address,
            metrics_address=f"{server.address.rpartition(':')[0]}:{shutdown.metrics_port}",
        )
        await process.knobs.recall(redis)
        await process.draft_models.recall(redis, config.namespace)
        await process.migration.open(server.address)
        stack.push_async_callback(process.migration.close)
        if process.stores is not None and process.fetcher is not None:
            stack.push_async_callback(process.stores.close)
            stack.push_async_callback(end, [asyncio.create_task(process.stores.run())])
            stack.push_async_callback(process.fetcher.close)
        await registration.update(**process.instance.status())
        if not await begun(registration.register(), shutdown):
            return await _leave(process, 0)
        await server.set_serving(True)
        shutdown.ready(server.address)
        try:
            if process.pregenerator is not None:
                running = asyncio.create_task(process.pregenerator.run(), name="pregenerate")
                stack.push_async_callback(end, [running])
            await _until_over(process, shutdown)
            await server.set_serving(False)
            await _evacuate(process)
        finally:
            await _leave(process, config.shutdown_grace_seconds)


async def _built(config: GenerationConfig, redis: Redis, shutdown: Shutdown) -> GenerationProcess:
    """Return the instance once its model is loaded; end the process if it is to stop before that.

    The thread that loads cannot be stopped, and a pod would otherwise be killed at the end of its grace period. The
    instance is not registered yet, so there is nothing to hand back. The ranks of a tensor parallel engine end when
    they lose their parent.
    """
    _log.info("loading", model=config.model)
    building = asyncio.create_task(build(config, redis, REGISTRY), name="build")
    asked = asyncio.create_task(shutdown.wait(), name="shutdown")
    await asyncio.wait((building, asked), return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        _log.info("stopped_while_loading", reason=shutdown.reason)
        sys.stdout.flush()
        os._exit(0)
    await end([asked])
    return building.result()


async def _until_over(process: GenerationProcess, shutdown: Shutdown) -> None:
    """Wait until the process should end; raise if the engine broke or the process may not continue."""
    broken = process.loop.broken
    await until_one_ends(
        [
            asyncio.create_task(shutdown.wait()),
            asyncio.create_task(_heartbeat(process)),
            # Shielded, because the tasks are cancelled at the end, and the loop's future must not be.
            asyncio.shield(asyncio.wrap_future(broken)),
        ]
    )
    if broken.done():
        raise RuntimeError("the engine failed") from broken.result()


async def _evacuate(process: GenerationProcess) -> None:
    """Let the samples be moved away, while heartbeats report that the instance is draining."""
    evacuation = asyncio.create_task(process.instance.evacuate(process.instance.evacuation_seconds))
    # Begin the evacuation first, so that the first heartbeat reports it.
    await asyncio.sleep(0)
    heartbeats = asyncio.create_task(_heartbeat(process))
    try:
        await asyncio.wait((evacuation, heartbeats), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end((evacuation, heartbeats))
    # Unavailable: the engine broke meanwhile, and has ended the streams itself.
    with suppress(Unavailable, asyncio.CancelledError):
        evacuation.result()


async def _leave(process: GenerationProcess, grace_seconds: float) -> None:
    """Hand back every sample, leave the fleet, stop."""
    await process.server.set_serving(False)
    # Unavailable: the engine is gone, and has ended the streams itself.
    with suppress(Unavailable):
        await process.instance.drain()
        if process.pregenerator is not None:
            await process.pregenerator.stored()
        await asyncio.wrap_future(process.loop.stop())
    with suppress(*OUTAGES):
        await process.registration.deregister()
    await process.server.stop(grace_seconds)


async def _heartbeat(process: GenerationProcess) -> None:
    """Report state and load; end the process if the device hangs, so that its samples are resumed elsewhere."""
    while not is_cancelled():
        if process.instance.hung:
            work = process.loop.work
            _log.error(
                "engine_hung", at="" if work is None else work.kind, load=process.instance.load_values()
            )
            os._exit(1)
        await process.registration.update(**process.instance.status())
        await asyncio.sleep(process.registration.pause(_HEARTBEAT_SECONDS))


if __name__ == "__main__":
    run("generation", serve, GenerationConfig)
