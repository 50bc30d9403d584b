"""An instance: the engine loop, the weights it serves, and what it tells the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from paceline.v1 import fleet_pb2
from services.generation.config import GenerationConfig
from services.generation.drafting import acceptance, alignment, selection
from services.generation.drafting.drafter import Drafter
from services.generation.drafting.given import GivenDrafter
from services.generation.drafting.own_model import OwnModelDrafter
from services.generation.drafting.reuse import Reuse
from services.generation.drafting.speculation import Speculation
from services.generation.drafting.suffix import SuffixDrafter
from services.generation.engine.types import SELF_W4, TensorSpec
from services.generation.intake import Intake
from services.generation.items import Terms
from services.generation.loop import EngineLoop
from services.generation.metrics import EngineMetrics
from services.generation.pregeneration.worker import Pregenerator
from services.generation.rollouts.cache import DraftCache, Shards
from services.generation.rollouts.fetcher import ShardFetcher, Stores
from services.generation.steering.gate import Gated
from services.generation.steering.steered import Counted, Floors, OriginOf, SteeredPlan
from services.generation.weights import StagedWeights, read_manifest, stage
from services.platform.errors import FailedPrecondition
from services.platform.registry import InstanceRecord
from services.policy.correction import CorrectedStepTime
from services.policy.drafter_time import eagle3_time, self_w4_time
from services.policy.knobs import Knobs
from services.policy.models import step_time_for
from services.policy.step_time import UnsupportedArchitecture

_log = structlog.get_logger(__name__)
_EVACUATION_POLL_SECONDS = 0.02
_STATES = {
    "serving": fleet_pb2.INSTANCE_STATE_SERVING,
    "paused": fleet_pb2.INSTANCE_STATE_PAUSED,
    "draining": fleet_pb2.INSTANCE_STATE_DRAINING,
}


async def _nobody() -> bool:
    return False


def _speculation(
    config: GenerationConfig, engine: Any, metrics: EngineMetrics, origin_of: OriginOf
) -> tuple[Speculation, SteeredPlan] | None:
    if config.speculation == "off":
        return None
    makers: dict[str, Callable[[], Drafter]] = {
        "given": _given,
        "suffix": lambda: _suffix(config, metrics),
    }
    # These import numba, which vLLM must come before.
    acceptance.warm_up()
    selection.warm_up()
    knobs = Knobs(mode=config.speculation, draft_cap=config.draft_window, margin=config.draft_margin)
    plan = _plan(config, knobs, engine, metrics, origin_of)
    drafters: list[Drafter] = [Gated(makers[name](), plan.wanted) for name in config.drafters]
    drafters += [
        _own_model(each, config, engine.dtype, plan, metrics) for each in engine.model_drafts.values()
    ]
    return Speculation(drafters, plan, engine.limits.vocab_size, Counted(metrics, plan)), plan


def _own_model(
    drafts: Any, config: GenerationConfig, dtype: str, plan: SteeredPlan, metrics: EngineMetrics
) -> OwnModelDrafter:
    def target() -> CorrectedStepTime | None:
        return plan.step_time

    if drafts.name == SELF_W4:
        time = self_w4_time(Path(config.model), dtype, config.self_w4_group, target)
        return OwnModelDrafter(drafts, plan, time, metrics=metrics.self_w4)
    assert config.eagle3 is not None
    return OwnModelDrafter(drafts, plan, eagle3_time(config.eagle3, dtype, target), metrics=metrics.eagle3)


def _plan(
    config: GenerationConfig, knobs: Knobs, engine: Any, metrics: EngineMetrics, origin_of: OriginOf
) -> SteeredPlan:
    try:
        step_time = step_time_for(Path(config.model), engine.dtype, config.calibration)
    except UnsupportedArchitecture as error:
        # No reason not to serve the model.
        _log.warning("no_step_time_model", reason=str(error), speculation="fixed")
        step_time = None
    floors = Floors(config.draft_floor, config.survival_floor)
    return SteeredPlan(
        knobs,
        step_time,
        origin_of,
        floors=floors,
        metrics=metrics.planner,
    )


def _given() -> Drafter:
    # Imports numba, which vLLM must come before.
    alignment.warm_up()
    return GivenDrafter()


def _suffix(config: GenerationConfig, metrics: EngineMetrics) -> Drafter:
    # Imports numba, which vLLM must come before.
    from services.drafts.index import SuffixIndex, warm_up

    warm_up()
    index = SuffixIndex(max_tokens=config.draft_index_tokens, floor=config.survival_floor)
    return SuffixDrafter(
        index,
        capacity=config.draft_index_tokens,
        tokens_per_step=config.draft_index_step_tokens,
        metrics=metrics.rollouts,
    )


@dataclass(frozen=True, slots=True)
class Applied:
    """What applying weights took: KV blocks that were dropped, and the seconds until pre-generation had stopped."""

    dropped_blocks: int = 0
    halt_seconds: float = 0.0


class Instance:
    """State of one instance. Built when the engine is ready; its methods run in the event loop."""

    def __init__(self, config: GenerationConfig, loop: EngineLoop, metrics: EngineMetrics) -> None:
        self.loop = loop
        self.staged: StagedWeights | None = None
        self._config = config
        self._metrics = metrics
        self._engine = loop.ready.result()
        self._manifest: Mapping[str, TensorSpec] = read_manifest(Path(config.model))
        self._draining = False
        self._updating = asyncio.Lock()
        self._registered_at = time.time()
        self.address = self.metrics_address = ""
        self.epoch = 0
        # None: the instance was started without speculation, and no knob changes that.
        self.steering: SteeredPlan | None = None
        speculating = _speculation(config, self._engine, metrics, loop.origin_of)
        # The drafters that have a model of their own, by name; used in the engine thread.
        self.own_models: dict[str, OwnModelDrafter] = {}
        if speculating is not None:
            loop.drafts.speculation, self.steering = speculating
            made = loop.drafts.speculation.drafters
            self.own_models = {each.name: each for each in made if isinstance(each, OwnModelDrafter)}
        self.intake = Intake(loop, self.terms, metrics.rollouts, config.draft_wait_seconds)
        loop.drafts.cache = self._cache = DraftCache(self._engine.limits.vocab_size, config.draft_cache_bytes)
        loop.background.threshold = config.background_threshold
        # None: nothing is pre-generated.
        self.pregenerator: Pregenerator | None = None
        loop.drafts.reuse = Reuse(config.reuse_chunk)
        # Ends the samples that were moved here and that no gateway has claimed; in the engine thread.
        self.leave_unclaimed: Callable[[], None] = lambda: None
        # Whether there is anybody who would move samples away.
        self.evacuators: Callable[[], Awaitable[bool]] = _nobody
        self._set_version(config.initial_version)
        metrics.most_running.set(config.max_num_seqs)
        metrics.engine.info(
            {"model": config.model, "device": self._engine.device, "speculation": config.speculation}
        )

    @property
    def evacuation_seconds(self) -> float:
        """Longest time to wait for samples to be moved away."""
        return self._config.evacuation_seconds

    @property
    def state(self) -> str:
        """serving, paused or draining."""
        if self._draining:
            return "draining"
        return "paused" if self.loop.paused else "serving"

    def terms(self) -> Terms:
        """On what terms samples are taken now."""
        closed = "it is draining" if self._draining else ""
        return Terms(self.loop.policy_version, self._engine.limits, closed)

    def fetch_from(self, stores: Stores) -> ShardFetcher:
        """Get the rollouts of samples' prompts from the draft store; to be closed at the end."""

        async def adopt(shards: Shards) -> None:
            await asyncio.wrap_future(self.loop.call(lambda: self.loop.adopt(shards)))

        self.intake.fetcher = ShardFetcher(stores, self._cache.fetched_for, adopt, self._metrics.rollouts)
        return self.intake.fetcher

    async def pause(self, paused: bool) -> None:
        """Stop stepping, or go on; going on also takes back a drain, for an instance that is to stay after all."""
        if not paused:
            self._draining = False

        def set_paused() -> None:
            self.loop.paused = paused

        await asyncio.wrap_future(self.loop.call(set_paused))

    async def evacuate(self, seconds: float) -> None:
        """Take nothing more; returns when the instance is empty, or after so long. At once where nobody would empty
        it: the samples are only waited for while they are being moved."""
        self._draining = True
        await asyncio.wrap_future(self.loop.call(self.loop.end_background))
        if seconds > 0 and self.loop.sample_count and await self.evacuators():
            deadline = time.monotonic() + seconds
            while (  # noqa: ASYNC110 (the engine thread sets no event)
                self._draining
                and self.loop.sample_count
                and not self.loop.paused
                and time.monotonic() < deadline
            ):
                await asyncio.sleep(_EVACUATION_POLL_SECONDS)

    async def drain(self, seconds: float = 0.0) -> int:
        """Take nothing more, let the samples be moved away for so long, and hand back the others with the tokens
        they have; the number handed back."""
        await self.evacuate(seconds)
        if not self._draining:
            # It was told to go on meanwhile.
            return 0
        return await asyncio.wrap_future(self.loop.call(self.loop.abort_all))

    async def stage(self, version: int, folder: Path, checksum: str) -> StagedWeights:
        """Read and check weights in a thread of their own; the engine steps on meanwhile."""
        async with self._updating:
            with self._metrics.weight_seconds.labels("stage").time():
                self.staged = await asyncio.to_thread(stage, folder, version, self._manifest, checksum)
        _log.info("weights_staged", version=version, checksum=self.staged.checksum)
        return self.staged

    async def apply(self, version: int) -> Applied:
        """Serve the staged weights from the next step on. What was being pre-generated ends, and is stored.

        Raises:
            FailedPrecondition: these weights are not staged, or samples of the old version are running.
        """
        async with self._updating:
            if self.loop.policy_version == version:
                return Applied()
            staged = self.staged
            if staged is None or staged.version != version:
                have = "nothing" if staged is None else str(staged.version)
                raise FailedPrecondition(
                    "NOT_STAGED", f"version {version} is not staged", requested=str(version), staged=have
                )
            with self._metrics.weight_seconds.labels("apply").time():
                halt_seconds = await self._halt()
                dropped = await asyncio.wrap_future(self.loop.call(lambda: self._apply(staged)))
            self.staged = None
            if self.pregenerator is not None:
                # Sent since the halt: the instances of the coming step are to find them.
                await self.pregenerator.stored()
        _log.info("weights_applied", version=version, dropped_blocks=dropped)
        return Applied(dropped, halt_seconds)

    async def _halt(self) -> float:
        """End the background samples; the seconds it took, 0 when there were none."""
        began = time.monotonic()
        ended = await asyncio.wrap_future(self.loop.call(self.loop.end_background))
        if not ended:
            return 0.0
        seconds = time.monotonic() - began
        if self.pregenerator is not None:
            self.pregenerator.metrics.halted_for_update(seconds)
        return seconds

    def _apply(self, staged: StagedWeights) -> int:
        # Items may have come since the halt.
        self.loop.end_background()
        self.leave_unclaimed()
        if self.loop.sample_count:
            raise FailedPrecondition(
                "SAMPLES_RUNNING",
                f"{self.loop.sample_count} samples of version {self.loop.policy_version} are running",
                running=str(self.loop.sample_count),
            )
        try:
            dropped: int = self._engine.apply_weights(staged.items())
        except Exception as error:
            # Half-loaded weights or surviving KV: nothing that this engine says can be trusted any more.
            self.loop.fail(error)
            raise
        self._set_version(staged.version)
        return dropped

    def _set_version(self, version: int) -> None:
        self.loop.policy_version = version
        self._metrics.policy_version.set(version)

    def discard(self, version: int) -> None:
        """Forget staged weights of a version."""
        if self.staged is not None and self.staged.version == version:
            self.staged = None

    @property
    def hung(self) -> bool:
        """Whether the engine thread has made no progress for longer than a step may take."""
        silent = time.monotonic() - self.loop.last_progress
        return self.loop.busy and not self.loop.paused and silent > self._config.step_timeout_seconds

    def load_values(self) -> dict[str, Any]:
        """The load as the registry stores it."""
        load = self.loop.load
        return {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}

    def record(self) -> InstanceRecord:
        """What the registry says of this instance."""
        return InstanceRecord(
            service="generation",
            instance_id=self._config.instance_id,
            epoch=self.epoch,
            address=self.address,
            metrics_address=self.metrics_address,
            state=self.state,
            policy_version=self.loop.policy_version,
            load=self.load_values(),
            max_running=self._config.max_num_seqs,
            max_model_len=self._engine.limits.max_model_len,
            vocab_size=self._engine.limits.vocab_size,
            model=self._config.model,
            device=self._engine.device,
            registered_at=self._registered_at,
        )

    def describe(self) -> fleet_pb2.Instance:
        """The public form of the record."""
        record = self.record()
        described = fleet_pb2.Instance(
            instance_id=record.instance_id,
            epoch=record.epoch,
            address=record.address,
            state=_STATES[record.state],
            policy_version=record.policy_version,
            load=self.loop.load,
            max_running=record.max_running,
            max_model_len=record.max_model_len,
            vocab_size=record.vocab_size,
            model=record.model,
            device=record.device,
            metrics_address=record.metrics_address,
        )
        described.registered_at.FromNanoseconds(int(record.registered_at * 1e9))
        return described
