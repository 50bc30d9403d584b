"""Composition root of an instance: builds its engine and every object that serves it.

`build` connects the parts in one place. `build_drafts` builds the drafts of the samples: the cache, the drafters
and the planner that the configuration names.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from paceline.internal.v1 import drafter_pb2_grpc as drafter_rpc
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.internal.v1 import migration_pb2_grpc as migration_rpc
from paceline.internal.v1 import policy_pb2_grpc as policy_rpc
from paceline.internal.v1 import weight_peer_pb2_grpc as peer_rpc
from paceline.v1 import weight_stream_pb2_grpc as stream_rpc
from services.contracts.knobs import DrafterKnobs, Knobs
from services.contracts.modes import MODES, OFF
from services.drafts.client import DraftStores
from services.generation.config import GenerationConfig
from services.generation.draft_cache.cache import DraftCache, Shards
from services.generation.draft_cache.fetcher import ShardFetcher
from services.generation.draft_cache.lenient_reuse import Reuse
from services.generation.drafters.build import build_drafters
from services.generation.drafters.draft_model import Eagle3Drafter
from services.generation.engine.model_support import Feature, ModelSupport
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.metrics import EngineMetrics, PregenerationMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import SampleTable
from services.generation.loop.work_stream import CheckpointRules
from services.generation.migration.metrics import MigrationMetrics
from services.generation.migration.migration import Migration
from services.generation.pregeneration.pregenerator import CoordinatorConnection, Pregenerator
from services.generation.pregeneration.upload_queue import UploadQueue
from services.generation.server.draft_model_service import DraftModelService
from services.generation.server.generation_service import GenerationInstance, GenerationService
from services.generation.server.knob_service import KnobService
from services.generation.server.sample_intake import SampleIntake, SchemaChecks
from services.generation.server.weight_stream_service import WeightPeerService, WeightStreamService
from services.generation.server.weight_updates import WeightUpdates
from services.generation.speculation import acceptance, selection
from services.generation.speculation.drafter import DrafterSetting
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.planner import KnobDrivenPlanner, OriginOf
from services.generation.speculation.speculation import Speculation
from services.generation.weights.stream.metrics import WeightStreamMetrics
from services.generation.weights.update_room import check_host
from services.platform.grpc.server import GrpcServer
from services.platform.launching import bind_ranks
from services.platform.redis.connection import OUTAGES, Keys
from services.platform.redis.registry import InstanceRecord, Registration, Registry
from services.step_time.estimator import StepTimeEstimator
from services.step_time.estimator import warm_up as warm_up_estimator
from services.step_time.sweep import MeasuredStep, SavedSweep, SweepSubject

_log = structlog.get_logger(__name__)


def build_drafts(
    config: GenerationConfig, engine: Any, metrics: EngineMetrics, origin_of: OriginOf
) -> SampleDrafts:
    """Build the drafts of an engine's samples: the cache, and the drafters and planner that the config names."""
    cache = DraftCache(engine.limits.vocab_size, config.draft_cache_bytes)
    # Without drafts a sample takes over a cached rollout one token a step.
    reuse = Reuse(config.reuse_chunk if engine.support.allows(Feature.DRAFTS) else 0)
    return SampleDrafts(metrics, cache, _speculation(config, engine, metrics, origin_of), reuse)


def _speculation(
    config: GenerationConfig, engine: Any, metrics: EngineMetrics, origin_of: OriginOf
) -> Speculation | None:
    if config.speculation == OFF or not engine.support.allows(Feature.DRAFTS):
        return None
    modes, drafters = ({}, {}) if engine.form is None else (engine.form.modes, engine.form.drafters)
    # These import numba, which vLLM must come before.
    acceptance.warm_up()
    selection.warm_up()
    warm_up_estimator()
    knobs = Knobs(
        mode=config.speculation,
        draft_cap=config.draft_window,
        margin=config.draft_margin,
        drafters=DrafterKnobs.model_validate(dict.fromkeys(config.drafters, True)),
    )
    fixed = FixedLengthPlanner(config.draft_window, config.draft_floor, config.survival_floor)
    assumed = config.assumed_step_times
    swept = _swept(config, engine) if assumed is None else SavedSweep.read(assumed).steps
    planner = KnobDrivenPlanner(
        knobs,
        StepTimeEstimator(swept),
        origin_of,
        fixed=fixed,
        metrics=metrics.planner,
        graphs=engine.graph_sizes,
        learns=assumed is None,
        modes={**MODES, **{name: replace(MODES[name], place=place) for name, place in modes.items()}},
    )
    setting = DrafterSetting(
        config,
        None,
        engine.limits.vocab_size,
        metrics.registry,
        engine.model_drafts,
        planner.draft_lengths,
        planner.account.lacked,
    )
    names = (*config.drafters, *engine.model_drafts)
    made = build_drafters(names, setting, metrics.fault, drafters)
    return Speculation(made, planner, engine.limits.vocab_size, metrics, late=config.steps_ahead)


def _swept(config: GenerationConfig, engine: Any) -> Sequence[MeasuredStep]:
    """Return the saved sweep of this engine, or measure one; empty if step times are learned while serving."""
    if config.calibration is not None:
        size, dtype = config.tensor_parallel_size, engine.dtype
        subject = SweepSubject.of(Path(config.model), engine.hardware, size, dtype)
        if (saved := SavedSweep.load(config.calibration, subject)) is not None:
            return saved.steps
        _log.warning("no_saved_sweep", path=str(config.calibration), subject=subject.model_dump())
    if not config.sweep_seconds:
        return ()
    from services.generation.engine.startup import measure_steps

    try:
        return measure_steps(engine, config.sweep_seconds)
    except Exception:
        # An engine that cannot serve fails with its first sample; any other learns step times as it serves.
        _log.exception("sweep_failed")
        return ()


@dataclass(frozen=True, slots=True)
class GenerationProcess:
    """Parts of an instance that `services.generation.__main__` starts and stops."""

    loop: EngineLoop
    instance: GenerationInstance
    server: GrpcServer
    registration: Registration
    knobs: KnobService
    draft_models: DraftModelService
    migration: Migration
    stores: DraftStores | None
    fetcher: ShardFetcher | None
    pregenerator: Pregenerator | None


async def build(
    config: GenerationConfig, redis: Redis, metrics_registry: CollectorRegistry
) -> GenerationProcess:
    """Load the model, and build the instance around its engine; it does not serve yet."""
    keys = Keys(config.namespace)
    registry = Registry(redis, keys)
    metrics = EngineMetrics(metrics_registry)
    loop = await _start_loop(config, metrics)
    check_host(config)
    registration = Registration(redis, keys, _record(config, loop.ready.result()))
    instance = GenerationInstance(
        config, loop, registration, partial(_any_registered, registry, "reallocator")
    )
    stores = DraftStores(config, registry, timeout=config.draft_fetch_seconds) if config.drafts else None
    fetcher = None if stores is None else _shard_fetcher(stores, loop, metrics)
    migration = Migration(config, loop, instance.terms, fetcher, MigrationMetrics(metrics_registry))
    intake = SampleIntake(
        loop,
        instance.terms,
        fetcher,
        migration.arrivals.claim,
        metrics.rollouts,
        config.draft_wait_seconds,
        SchemaChecks.of_model(Path(config.model), loop.ready.result().limits),
    )
    pregenerator = None
    support: ModelSupport = loop.ready.result().support
    if stores is not None and config.pregenerate and support.allows(Feature.PREGENERATION):
        pregeneration_metrics = PregenerationMetrics(metrics_registry)
        uploads = UploadQueue(stores, pregeneration_metrics)
        coordinator = CoordinatorConnection(config, registry)
        # A fork resumes from a prefix.
        speculation = loop.drafts.speculation
        drafters = () if speculation is None else speculation.drafters
        forked = support.allows(Feature.RESUMING) and any(each.uses_forks for each in drafters)
        pregenerator = Pregenerator(
            config if forked else config.model_copy(update={"forks": 0}),
            loop,
            instance.terms,
            registration,
            fetcher,
            coordinator,
            uploads,
            pregeneration_metrics,
        )
    stream_metrics = WeightStreamMetrics(metrics_registry)
    weights = WeightUpdates(
        config, loop, migration.arrivals.end_unclaimed, pregenerator, metrics, stream_metrics
    )
    knobs, draft_models = _speculation_services(config, loop, registration)

    generation = GenerationService(
        instance, intake, weights, CheckpointRules(config.checkpoint_tokens, config.checkpoint_seconds)
    )
    server = _server(config, generation, knobs, draft_models, migration, weights)
    return GenerationProcess(
        loop, instance, server, registration, knobs, draft_models, migration, stores, fetcher, pregenerator
    )


def _server(
    config: GenerationConfig,
    generation: GenerationService,
    knobs: KnobService,
    draft_models: DraftModelService,
    migration: Migration,
    weights: WeightUpdates,
) -> GrpcServer:
    server = GrpcServer(config, service="generation")
    rpc.add_GenerationServiceServicer_to_server(generation, server.server)
    policy_rpc.add_KnobServiceServicer_to_server(knobs, server.server)
    drafter_rpc.add_DraftModelServiceServicer_to_server(draft_models, server.server)
    migration_rpc.add_MigrationServiceServicer_to_server(migration, server.server)
    stream_rpc.add_WeightStreamServiceServicer_to_server(WeightStreamService(weights.streams), server.server)
    peer_rpc.add_WeightPeerServiceServicer_to_server(WeightPeerService(weights.streams), server.server)
    return server


def _speculation_services(
    config: GenerationConfig, loop: EngineLoop, registration: Registration
) -> tuple[KnobService, DraftModelService]:
    """Return the services that change how an instance drafts: its knobs, and the weights of its draft model."""
    speculation = loop.drafts.speculation
    planner = None if speculation is None else speculation.plan
    drafters = {} if speculation is None else {each.name: each for each in speculation.drafters}
    head = drafters.get(Eagle3Drafter.name)
    return (
        KnobService(config, loop, cast("KnobDrivenPlanner | None", planner), registration),
        DraftModelService(config.eagle3, loop, cast("Eagle3Drafter | None", head)),
    )


async def _start_loop(config: GenerationConfig, metrics: EngineMetrics) -> EngineLoop:
    """Start the engine's thread; returns when it has loaded the model."""
    samples = SampleTable(metrics.background, config.background_threshold)
    loop = EngineLoop(
        partial(build_engine, config, metrics, samples.origin_of),
        metrics,
        samples,
        flush_interval=config.flush_interval_seconds,
        max_waiting=config.max_waiting,
        policy_version=config.initial_version,
    )
    loop.start()
    engine = await asyncio.wrap_future(loop.ready)
    metrics.policy_version.set(config.initial_version)
    metrics.most_running.set(engine.max_running)
    about = {"model": config.model, "device": engine.device, "attention": engine.attention}
    metrics.engine.info({**about, "speculation": config.speculation, "refused": str(engine.support)})
    for feature in engine.support.refused:
        metrics.features_refused.labels(feature.value).set(1)
    for kind in engine.failed_kernels:
        metrics.kernels_left_out.labels(kind).set(1)
    return loop


def build_engine(
    config: GenerationConfig, metrics: EngineMetrics, origin_of: OriginOf
) -> tuple[Any, SampleDrafts]:
    """Build the engine and the drafts of its samples; called in the thread that steps it."""
    # Read by vLLM's CPU platform when the workers start.
    binding = bind_ranks(config.threads_bind, config.tensor_parallel_size)
    if binding is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = binding
    from services.generation.engine.environment import choose_invariance, choose_runner

    choose_runner(config.engine)
    choose_invariance(config.batch_invariant)
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import check_drafts, warm_up

    engine = Engine(config.engine_options())
    warm_up(engine)
    if config.draft_check and config.speculation != OFF:
        check_drafts(engine)
    return engine, build_drafts(config, engine, metrics, origin_of)


def _shard_fetcher(stores: DraftStores, loop: EngineLoop, metrics: EngineMetrics) -> ShardFetcher:
    async def deliver(shards: Shards) -> None:
        await loop.execute(lambda: loop.drafts.add_shards(shards, loop.samples))

    return ShardFetcher(stores, loop.drafts.cache.fetched_for, deliver, metrics.rollouts)


def _record(config: GenerationConfig, engine: Any) -> InstanceRecord:
    return InstanceRecord(
        service="generation",
        instance_id=config.instance_id,
        max_running=engine.max_running,
        max_model_len=engine.limits.max_model_len,
        vocab_size=engine.limits.vocab_size,
        has_text=engine.limits.has_text,
        end_tokens=list(engine.limits.end_tokens),
        model=config.model,
        device=engine.device,
        refused_features=engine.support.by_name(),
        keeps_kv=engine.support.allows(Feature.KEEP_KV),
        registered_at=time.time(),
    )


async def _any_registered(registry: Registry, service: str) -> bool:
    try:
        return bool(await registry.list(service))
    except OUTAGES:
        return False
