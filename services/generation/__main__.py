"""Start an instance: `python -m services.generation --model DIR --redis-url URL`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import structlog
from prometheus_client import REGISTRY

from paceline.internal.v1 import drafter_pb2_grpc as drafter_rpc
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.internal.v1 import migration_pb2_grpc as migration_rpc
from paceline.internal.v1 import policy_pb2_grpc as policy_rpc
from services.generation.config import GenerationConfig
from services.generation.draft_models import DraftModels
from services.generation.draft_service import DraftModelService
from services.generation.instance import Instance
from services.generation.knobs import KnobService
from services.generation.loop import EngineLoop
from services.generation.metrics import EngineMetrics
from services.generation.migration.metrics import MigrationMetrics
from services.generation.migration.migration import Migration
from services.generation.migration.service import MigrationService
from services.generation.pregeneration.context import pregenerating
from services.generation.pregeneration.metrics import PregenerationMetrics
from services.generation.rollouts.stores import watched_stores
from services.generation.service import GenerationService
from services.platform.errors import Unavailable
from services.platform.heap import keep_freed_memory
from services.platform.process import Shutdown, run
from services.platform.registry import Registration, Registry
from services.platform.server import GrpcServer
from services.platform.store import OUTAGES, Keys, connect
from services.platform.tasks import end, is_cancelled
from services.policy.machine import on_cpu

_log = structlog.get_logger(__name__)
_HEARTBEAT_SECONDS = 1.0
# How long the engine's thread may keep the interpreter when another thread wants it. Python's own 5 ms are more
# than a step of a small model, and a moved sample waits for several such hand-overs while it is frozen.
_SWITCH_SECONDS = 0.0005


async def serve(config: GenerationConfig, shutdown: Shutdown) -> None:
    """Load the model, then serve until told to stop or the engine breaks."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    if on_cpu():
        keep_freed_memory()
    metrics = EngineMetrics(REGISTRY)
    loop = EngineLoop(
        lambda: _build_engine(config),
        metrics,
        flush_interval=config.flush_interval_seconds,
        max_waiting=config.max_waiting,
    )
    loop.start()
    await asyncio.wrap_future(loop.ready)
    instance = Instance(config, loop, metrics)
    server = GrpcServer(config, service="generation")
    rpc.add_GenerationServiceServicer_to_server(GenerationService(instance), server.server)
    engine = loop.ready.result()
    knobs = KnobService(config, instance, engine.dtype, engine.device)
    policy_rpc.add_KnobServiceServicer_to_server(knobs, server.server)
    draft_models = DraftModels(config, instance, metrics)
    drafter_rpc.add_DraftModelServiceServicer_to_server(DraftModelService(draft_models), server.server)
    migration = Migration(config, instance, MigrationMetrics(REGISTRY))
    migration_rpc.add_MigrationServiceServicer_to_server(MigrationService(migration), server.server)
    await server.start()
    instance.address = server.address
    instance.metrics_address = f"{server.address.rpartition(':')[0]}:{shutdown.metrics_port}"
    async with connect(config) as store, AsyncExitStack() as stack:
        keys = Keys(config.namespace)
        registry = Registry(store, keys)
        await knobs.recall(store)
        await draft_models.recall(store, keys)
        await migration.open(server.address)
        stack.push_async_callback(migration.close)
        if config.drafts:
            looking = watched_stores(config, registry, config.draft_fetch_seconds)
            stores = await stack.enter_async_context(looking)
            stack.push_async_callback(instance.fetch_from(stores).close)
        registration = Registration(store, keys, instance.record())
        instance.evacuators = partial(_are_there, registry, "reallocator")
        instance.epoch = await registration.register()
        await server.set_serving(True)
        shutdown.ready(server.address)
        try:
            if config.drafts and config.pregenerate:
                ahead = pregenerating(config, instance, stores, registry, PregenerationMetrics(REGISTRY))
                await stack.enter_async_context(ahead)
            await _until_over(shutdown, loop, _heartbeat(instance, registration))
            await server.set_serving(False)
            await _evacuate(instance, registration)
        finally:
            await _leave(config, instance, server, registration)


async def _until_over(shutdown: Shutdown, loop: EngineLoop, beating: Coroutine[Any, Any, None]) -> None:
    """Wait until the process should end. Raises what broke the engine, or why this process may not go on."""
    beats = asyncio.create_task(beating)
    ends: set[asyncio.Future[Any]] = {
        asyncio.create_task(shutdown.wait()),
        beats,
        # Shielded: what is cancelled below must not be the loop's own future.
        asyncio.shield(asyncio.wrap_future(loop.broken)),
    }
    done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    if loop.broken.done():
        raise RuntimeError("the engine failed") from loop.broken.result()
    if beats in done:
        beats.result()


async def _evacuate(instance: Instance, registration: Registration) -> None:
    """Let the samples be moved away. The instance is alive meanwhile, and says that it is draining."""
    emptying = asyncio.create_task(instance.evacuate(instance.evacuation_seconds))
    # Once begun: the first heartbeat is to say so.
    await asyncio.sleep(0)
    beats = asyncio.create_task(_heartbeat(instance, registration))
    try:
        await asyncio.wait((emptying, beats), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end((emptying, beats))
    # Unavailable: the engine broke meanwhile, and has ended the streams itself.
    with suppress(Unavailable, asyncio.CancelledError):
        emptying.result()


async def _are_there(registry: Registry, service: str) -> bool:
    try:
        return bool(await registry.list(service))
    except OUTAGES:
        return False


async def _leave(
    config: GenerationConfig, instance: Instance, server: GrpcServer, registration: Registration
) -> None:
    """Hand back every sample, leave the fleet, stop."""
    await server.set_serving(False)
    # Unavailable: the engine is gone, and has ended the streams itself.
    with suppress(Unavailable):
        await instance.drain()
        if instance.pregenerator is not None:
            await instance.pregenerator.stored()
        await asyncio.wrap_future(instance.loop.stop())
    with suppress(*OUTAGES):
        await registration.deregister()
    await server.stop(config.shutdown_grace_seconds)


def _build_engine(config: GenerationConfig) -> object:
    # Read by vLLM's CPU platform when the worker starts.
    if config.threads_bind is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.threads_bind
    from services.generation.engine.core import Engine
    from services.generation.engine.warmup import warm_up

    engine = Engine(config.engine_options())
    warm_up(engine)
    return engine


async def _heartbeat(instance: Instance, registration: Registration) -> None:
    """Report state and load. A hung device is not reported alive: the process ends and its samples move on."""
    while not is_cancelled():
        if instance.hung:
            _log.error("engine_hung", load=instance.load_values())
            os._exit(1)
        await registration.update(
            state=instance.state,
            policy_version=instance.loop.policy_version,
            load=instance.load_values(),
        )
        await asyncio.sleep(_HEARTBEAT_SECONDS)


if __name__ == "__main__":
    run("generation", serve, GenerationConfig)
