"""Weight updates of an instance: weights are staged while the engine runs, and applied between two steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from paceline.internal.v1.weight_peer_pb2 import PeerWeights
from paceline.v1.weight_pb2 import DiskWeights
from services.contracts.errors import KEEPING_KV, Aborted, FailedPrecondition, kv_not_kept
from services.generation.config import GenerationConfig
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.metrics import EngineMetrics
from services.generation.pregeneration.pregenerator import Pregenerator
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.files import Proceed
from services.generation.weights.staging import StagedWeights, most_bytes, read_manifest
from services.generation.weights.stream.metrics import WeightStreamMetrics
from services.generation.weights.stream.streams import WeightStreams
from services.platform.grpc.channel import open_channel
from services.platform.tasks import to_the_end, uninterrupted

if TYPE_CHECKING:
    import torch

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AppliedWeights:
    """Cost of applying weights: KV blocks that were dropped, and seconds until pre-generation had stopped.

    `continued` samples continue under them, `kept` of these with the KV that they have.
    """

    dropped_blocks: int = 0
    halt_seconds: float = 0.0
    continued: int = 0
    kept: int = 0


class WeightUpdates:
    """Stages and applies weights of policy versions, one at a time. Its methods run in the event loop."""

    def __init__(
        self,
        config: GenerationConfig,
        loop: EngineLoop,
        end_unclaimed: Callable[[], None],
        pregenerator: Pregenerator | None,
        metrics: EngineMetrics,
        stream_metrics: WeightStreamMetrics,
    ) -> None:
        """Update the weights of one engine.

        Args:
            config: names the model's folder, with the manifest that weights are checked against.
            loop: of the engine that the weights are applied to; it is ready.
            end_unclaimed: ends the samples that were moved here and that no gateway has claimed, in the engine
                thread.
            pregenerator: stores what was pre-generated before an update is done; None without pre-generation.
            metrics: of the instance.
            stream_metrics: of weights that are received and served.
        """
        self.staged: StagedWeights | None = None
        self._instance_id = config.instance_id
        self._loop = loop
        self._adopted = AdoptedWeights(config.adopted_weights) if config.adopted_weights else None
        model = Path(config.model)
        engine = loop.ready.result()
        manifest = read_manifest(model, engine.dtype, engine.ties_head)
        self._reader = WeightReader(model, manifest, config.weights_root, self._adopted)
        self.streams = WeightStreams(
            config,
            self._adopted,
            lambda address: open_channel(address, config),
            stream_metrics,
            most_bytes=most_bytes(manifest.values()),
        )
        self._end_unclaimed = end_unclaimed
        self._pregenerator = pregenerator
        self._metrics = metrics
        self._updating = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.sources: Mapping[str, Callable[[int, Any], Awaitable[StagedWeights]]] = {
            "disk": lambda version, disk: self.stage(version, _given(disk)),
            "peers": self.receive,
        }
        """Ways to stage a version, by the field of StageWeights that describes the weights."""

    async def stage(self, version: int, given: GivenWeights) -> StagedWeights:
        """Read and check weights in a separate thread, while the engine keeps stepping."""
        async with self._updating:
            self._supersede(version)
            with self._metrics.weight_seconds.labels("stage").time():
                staged = await read_in_thread(partial(self._reader.read, version, given))
            self.staged = staged
        _log.info("weights_staged", version=version, checksum=staged.checksum)
        return staged

    async def receive(self, version: int, order: PeerWeights) -> StagedWeights:
        """Receive weights from a trainer or other instances and check them, while the engine keeps stepping."""
        self._supersede(version)
        received = await self.streams.receive(version, order)
        read = partial(self._reader.read_received, version, received.folder, received.checksum)
        async with self._updating:
            judging = self.streams.judging(order.update_id)
            with self._metrics.weight_seconds.labels("stage").time(), judging:
                staged = await read_in_thread(partial(read, received.contents))
            self.staged = staged
        _log.info("weights_staged", version=version, checksum=staged.checksum)
        return staged

    async def apply(self, version: int, *, in_flight: bool = False, keep_kv: bool = False) -> AppliedWeights:
        """Serve the staged weights from the next step on. Background samples end, and are stored.

        With `in_flight` the other samples keep their tokens and continue under these weights; samples that are
        being moved are handed back. With `keep_kv`, those that decode also keep their KV.

        Raises:
            FailedPrecondition: these weights are not staged, samples are running without `in_flight`, or the
                engine cannot keep KV (KV_NOT_KEPT).
        """
        # The engine continues if the caller disconnects, and so does the rest of the update.
        return await to_the_end(self._apply_staged(version, in_flight, keep_kv), self._tasks)

    async def discard(self, version: int) -> None:
        """Forget staged weights of a version, and give up receiving the rest."""
        await to_the_end(self._discard(version), self._tasks)

    async def _apply_staged(self, version: int, in_flight: bool, keep_kv: bool) -> AppliedWeights:
        async with self._updating:
            if self._loop.policy_version == version:
                return AppliedWeights()
            staged = self.staged
            if staged is None or staged.version != version:
                have = "nothing" if staged is None else str(staged.version)
                raise FailedPrecondition(
                    "NOT_STAGED", f"version {version} is not staged", requested=str(version), staged=have
                )
            if keep_kv:
                self._check_keeps_kv()
            with self._metrics.weight_seconds.labels("apply").time():
                halt_seconds = await self._halt()
                applied = await self._loop.execute(lambda: self._apply(staged, in_flight, keep_kv))
            self.staged = None
            if self._adopted is not None:
                await asyncio.to_thread(self._adopted.prune, version, staged.checksum)
            if self._pregenerator is not None:
                # Uploaded since the halt, so that the instances of the next step find them.
                await self._pregenerator.stored()
        _log.info(
            "weights_applied",
            version=version,
            dropped_blocks=applied.dropped_blocks,
            continued=applied.continued,
            kept=applied.kept,
        )
        return replace(applied, halt_seconds=halt_seconds)

    async def _discard(self, version: int) -> None:
        await self.streams.end(version)
        if self.staged is not None and self.staged.version == version:
            self.staged = None
        if self._adopted is not None and version != self._loop.policy_version:
            self._adopted.hide(version)

    def _check_keeps_kv(self) -> None:
        refused: Mapping[str, str] = self._loop.ready.result().support.by_name()
        if why := refused.get(KEEPING_KV):
            raise kv_not_kept(self._instance_id, why)

    def _supersede(self, version: int) -> None:
        """Forget the staged weights of another version, before the new ones need memory."""
        if self.staged is not None and self.staged.version != version:
            self.staged = None

    async def _halt(self) -> float:
        """End the background samples; return the seconds it took, 0 if there were none."""
        began = time.monotonic()
        if not await self._loop.execute(self._loop.end_background):
            return 0.0
        seconds = time.monotonic() - began
        if self._pregenerator is not None:
            self._pregenerator.metrics.update_halt_seconds.observe(seconds)
        return seconds

    def _apply(self, staged: StagedWeights, in_flight: bool, keep_kv: bool) -> AppliedWeights:
        """Apply weights in the engine thread; see `replace_weights`."""

        def tensors() -> Iterable[tuple[str, torch.Tensor]]:
            # Before the engine is changed, because it does not survive a load that fails.
            staged.tensors.check_unchanged()
            return staged.tensors.items()

        applied = replace_weights(
            self._loop, staged.version, tensors, self._end_unclaimed, in_flight=in_flight, keep_kv=keep_kv
        )
        self._metrics.policy_version.set(staged.version)
        return applied


def _given(disk: DiskWeights) -> GivenWeights:
    """Return weights that are on disk; an empty path is one that check_weight_folder refuses."""
    if not disk.delta:
        return GivenWeights(Path(disk.path), disk.checksum)
    return GivenWeights(Path(disk.path) if disk.path else None, disk.checksum, Path(disk.delta))


async def read_in_thread(read: Callable[[Proceed], StagedWeights]) -> StagedWeights:
    """Read weights in a thread, which ends soon after a cancellation, because another update may wait for it."""
    given_up = threading.Event()

    def proceed() -> None:
        if given_up.is_set():
            raise Aborted("STAGING_ENDED", "staging of these weights was stopped: the update was given up")

    return await uninterrupted(asyncio.to_thread(read, proceed), hasten=given_up.set)


def replace_weights(
    loop: EngineLoop,
    version: int,
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    end_unclaimed: Callable[[], None],
    *,
    in_flight: bool,
    keep_kv: bool = False,
) -> AppliedWeights:
    """Replace the weights between two steps.

    Called in the engine thread. `tensors` returns the weights, or raises if they cannot be applied any more. With
    `in_flight` samples continue, and with `keep_kv` those that have sampled a token do so with the KV that they
    have. Others are still reading their prompt: they begin again, and are of the new version alone.

    Raises:
        FailedPrecondition: samples are running without `in_flight`.
    """
    # Samples may have arrived since the halt.
    loop.end_background()
    end_unclaimed()
    running = loop.samples.real_count
    if running and not in_flight:
        raise FailedPrecondition(
            "SAMPLES_RUNNING",
            f"{running} samples of version {loop.policy_version} are running",
            running=str(running),
        )
    checked = tensors()
    # Samples that are being moved are handed back, because the KV being read would belong to neither version.
    loop.abort_samples([loop.samples[key] for key in list(loop.watchers) if key in loop.samples])
    # Tokens sampled under the old weights are reported with the old version.
    loop.flush(everything=True)
    engine, samples = loop.ready.result(), loop.samples
    kept = set[str]()
    if in_flight and keep_kv:
        decoding = (key for key in engine.keepable() if key in samples)
        kept = {key for key in decoding if samples[key].started is not None}
    try:
        dropped: int = engine.apply_weights(checked, preempt=in_flight, keep=kept)
    except Exception as error:
        # The weights may be half loaded, or old KV may survive, so the engine cannot be trusted any more.
        loop.fail(error)
        raise
    loop.policy_version = version
    for key, sample in samples.items():
        sample.policy_version, sample.mixed_kv = version, key in kept
    return AppliedWeights(dropped, continued=samples.real_count, kept=len(kept))
