"""State of an instance: whether it takes samples, and its entry in the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from paceline.times import seconds_of
from paceline.v1 import fleet_pb2
from services.generation.config import GenerationConfig
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.engine_thread import WorkKind
from services.generation.loop.work_items import AdmissionTerms
from services.platform.redis.registration import Registration
from services.platform.redis.registry import InstanceRecord

_EVACUATION_POLL_SECONDS = 0.02
_STATES = {
    "serving": fleet_pb2.INSTANCE_STATE_SERVING,
    "paused": fleet_pb2.INSTANCE_STATE_PAUSED,
    "draining": fleet_pb2.INSTANCE_STATE_DRAINING,
}
# Fields of the record that its public form has as they are.
_DESCRIBED = (
    *("instance_id", "epoch", "address", "policy_version", "max_running"),
    *("max_model_len", "vocab_size", "model", "device", "metrics_address", "refused_features"),
)


class GenerationInstance:
    """Pauses, drains and describes one instance. Its methods run in the event loop."""

    def __init__(
        self,
        config: GenerationConfig,
        loop: EngineLoop,
        registration: Registration,
        has_reallocator: Callable[[], Awaitable[bool]],
    ) -> None:
        """`has_reallocator` tells whether anybody would move samples away. The engine is ready."""
        self.evacuation_seconds = config.evacuation_seconds
        """Longest time to wait for samples to be moved away."""
        self._limits_of_work = {
            WorkKind.STEP: config.step_timeout_seconds,
            WorkKind.COMMAND: config.command_timeout_seconds,
        }
        self._loop = loop
        engine = loop.ready.result()
        self._limits, self._lenient_drafts = engine.limits, config.lenient_drafts
        self._registration = registration
        self._has_reallocator = has_reallocator
        self._draining = False

    @property
    def state(self) -> str:
        """serving, paused or draining."""
        if self._draining:
            return "draining"
        return "paused" if self._loop.paused else "serving"

    @property
    def hung(self) -> bool:
        """True when the engine thread is at one step, or at one command, for longer than that may take."""
        work = self._loop.work
        return work is not None and self._loop.now - work.since > self._limits_of_work[work.kind]

    def terms(self) -> AdmissionTerms:
        """Return the terms on which samples are taken now."""
        closed = "it is draining" if self._draining else ""
        return AdmissionTerms(self._loop.policy_version, self._limits, closed, self._lenient_drafts)

    async def pause(self, paused: bool) -> None:
        """Stop stepping, or go on; going on also takes back a drain, for an instance that is to stay after all."""
        if not paused:
            self._draining = False

        def set_paused() -> None:
            self._loop.paused = paused

        await self._loop.execute(set_paused)

    async def evacuate(self, seconds: float) -> None:
        """Take no more samples; return when the instance is empty, or after so long.

        Returns at once without a reallocator: samples are only waited for while they are being moved.
        """
        self._draining = True
        loop = self._loop
        await loop.execute(loop.end_background)
        if seconds > 0 and loop.samples.real_count and await self._has_reallocator():
            deadline = time.monotonic() + seconds
            while (  # noqa: ASYNC110 (the engine thread sets no event)
                self._draining and loop.samples.real_count and not loop.paused and time.monotonic() < deadline
            ):
                await asyncio.sleep(_EVACUATION_POLL_SECONDS)

    async def drain(self, seconds: float = 0.0) -> int:
        """Evacuate the instance for so long, then hand back the other samples with the tokens that they have.

        Returns the number handed back.
        """
        await self.evacuate(seconds)
        if not self._draining:
            # It was told to go on meanwhile.
            return 0
        return await self._loop.execute(self._loop.abort_all)

    def load_values(self) -> dict[str, Any]:
        """Return the load as the registry stores it: plain numbers, times in seconds."""
        load = self._loop.load
        return {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "step_seconds": seconds_of(load.step_time),
            "generated_tokens": load.generated_tokens,
            "steps": load.steps,
        }

    def status(self) -> dict[str, Any]:
        """Return the fields of the record that change while the instance serves."""
        return {"state": self.state, "policy_version": self._loop.policy_version, "load": self.load_values()}

    def record(self) -> InstanceRecord:
        """Return the instance's entry in the registry as of now."""
        return replace(self._registration.record, **self.status())

    def describe(self) -> fleet_pb2.Instance:
        """Return the public form of the record."""
        record = self.record()
        described = fleet_pb2.Instance(
            state=_STATES[record.state],
            load=self._loop.load,
            **{name: getattr(record, name) for name in _DESCRIBED},
        )
        described.registered_at.FromNanoseconds(int(record.registered_at * 1e9))
        return described
