"""Weight updates of an instance: weights are staged beside the running engine, and applied between two steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.contracts.errors import FailedPrecondition
from services.generation.config import GenerationConfig
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.metrics import EngineMetrics
from services.generation.pregeneration.pregenerator import Pregenerator
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.staging import StagedWeights, read_manifest

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AppliedWeights:
    """Cost of applying weights: KV blocks that were dropped, and seconds until pre-generation had stopped."""

    dropped_blocks: int = 0
    halt_seconds: float = 0.0


class WeightUpdates:
    """Stages and applies weights of policy versions, one at a time. Its methods run in the event loop."""

    def __init__(
        self,
        config: GenerationConfig,
        loop: EngineLoop,
        end_unclaimed: Callable[[], None],
        pregenerator: Pregenerator | None,
        metrics: EngineMetrics,
    ) -> None:
        """Update the weights of one engine.

        Args:
            config: names the model's folder, with the manifest that weights are checked against.
            loop: of the engine that the weights are applied to; it is ready.
            end_unclaimed: ends the samples that were moved here and that no gateway has claimed, in the engine
                thread.
            pregenerator: stores what was pre-generated before an update is done; None without pre-generation.
            metrics: of the instance.
        """
        self.staged: StagedWeights | None = None
        self._loop = loop
        self._adopted = AdoptedWeights(config.adopted_weights) if config.adopted_weights else None
        manifest = read_manifest(Path(config.model))
        self._reader = WeightReader(manifest, config.weights_root, self._adopted)
        self._end_unclaimed = end_unclaimed
        self._pregenerator = pregenerator
        self._metrics = metrics
        self._updating = asyncio.Lock()

    async def stage(self, version: int, given: GivenWeights) -> StagedWeights:
        """Read and check weights in a thread of their own; the engine steps on meanwhile."""
        async with self._updating:
            with self._metrics.weight_seconds.labels("stage").time():
                self.staged = await asyncio.to_thread(self._reader.read, version, given)
        _log.info("weights_staged", version=version, checksum=self.staged.checksum)
        return self.staged

    async def apply(self, version: int) -> AppliedWeights:
        """Serve the staged weights from the next step on. Background samples end, and are stored.

        Raises:
            FailedPrecondition: these weights are not staged, or samples of the old version are running.
        """
        async with self._updating:
            if self._loop.policy_version == version:
                return AppliedWeights()
            staged = self.staged
            if staged is None or staged.version != version:
                have = "nothing" if staged is None else str(staged.version)
                raise FailedPrecondition(
                    "NOT_STAGED", f"version {version} is not staged", requested=str(version), staged=have
                )
            with self._metrics.weight_seconds.labels("apply").time():
                halt_seconds = await self._halt()
                dropped = await self._loop.execute(lambda: self._apply(staged))
            self.staged = None
            if self._adopted is not None:
                await asyncio.to_thread(self._adopted.prune, version, staged.checksum)
            if self._pregenerator is not None:
                # Uploaded since the halt: the instances of the coming step are to find them.
                await self._pregenerator.stored()
        _log.info("weights_applied", version=version, dropped_blocks=dropped)
        return AppliedWeights(dropped, halt_seconds)

    def discard(self, version: int) -> None:
        """Forget staged weights of a version."""
        if self.staged is not None and self.staged.version == version:
            self.staged = None
        if self._adopted is not None and version != self._loop.policy_version:
            self._adopted.hide(version)

    async def _halt(self) -> float:
        """End the background samples; returns the seconds it took, 0 when there were none."""
        began = time.monotonic()
        if not await self._loop.execute(self._loop.end_background):
            return 0.0
        seconds = time.monotonic() - began
        if self._pregenerator is not None:
            self._pregenerator.metrics.update_halt_seconds.observe(seconds)
        return seconds

    def _apply(self, staged: StagedWeights) -> int:
        """Apply weights in the engine thread; returns the KV blocks that were dropped."""
        loop = self._loop
        # Samples may have come since the halt.
        loop.end_background()
        self._end_unclaimed()
        if running := loop.samples.real_count:
            raise FailedPrecondition(
                "SAMPLES_RUNNING",
                f"{running} samples of version {loop.policy_version} are running",
                running=str(running),
            )
        # Before the engine is touched, which does not survive a load that breaks off.
        staged.tensors.check_unchanged()
        try:
            dropped: int = loop.ready.result().apply_weights(staged.tensors.items())
        except Exception as error:
            # Half-loaded weights or surviving KV: nothing that this engine says can be trusted any more.
            loop.fail(error)
            raise
        loop.policy_version = staged.version
        self._metrics.policy_version.set(staged.version)
        return dropped
