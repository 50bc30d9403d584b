"""Weight updates by folder, and the pauses around them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from paceline import AsyncClient
from paceline import types as t
from paceline.errors import PacelineError
from paceline.shards import OpenShard
from paceline.version_push import VersionPush
from services.facade.metrics import FacadeMetrics
from services.facade.samples import SamplesInWork


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """A published update."""

    version: int
    instances: Sequence[t.InstanceUpdate]
    aborted: int
    continued: int

    @property
    def message(self) -> str:
        """Summary for people; names the instances that failed."""
        failed = [f"{each.instance_id}: {each.error}" for each in self.instances if each.error]
        counts = f"{self.aborted} samples ended and {self.continued} go on"
        summary = f"version {self.version} is published; {counts}"
        return "; ".join([summary, *failed])


@dataclass(slots=True)
class Updates:
    """Updates and pauses of one facade."""

    client: Callable[[], AsyncClient]
    samples: SamplesInWork
    metrics: FacadeMetrics
    published: Callable[[int], None]
    """Gets the version of each update that is published."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def pause(self, mode: str) -> int:
        """Let new requests wait; return how many samples were aborted.

        Mode `abort` ends the requests of this facade that run, of runs that the caller may name; `wait` waits until
        all have ended, and any other lets them go on.
        """
        self.samples.pause()
        self.metrics.paused.set(1)
        if mode == "abort":
            return await self.samples.abort()
        if mode == "wait":
            await self.samples.drained()
        return 0

    def resume(self) -> None:
        """End a pause."""
        self.samples.resume()
        self.metrics.paused.set(0)

    async def from_folder(
        self, run_id: str, path: str, in_flight: t.InFlight, version_of: Callable[[int], int]
    ) -> UpdateOutcome:
        """Check, stage, apply and publish the weights in a folder; an error aborts the update.

        `version_of` returns the new version for the published one. A repeated request goes on with the update that
        it began, as long as that is not published.
        """
        async with self._lock:
            try:
                outcome = await self._update(run_id, path, in_flight, version_of)
            except PacelineError:
                self.metrics.updates.labels("failed").inc()
                raise
        self.metrics.updates.labels("published").inc()
        self.published(outcome.version)
        return outcome

    async def _update(
        self, run_id: str, path: str, in_flight: t.InFlight, version_of: Callable[[int], int]
    ) -> UpdateOutcome:
        client, policy = self.client(), t.WeightTarget.POLICY
        push = await VersionPush.begin(client, run_id, policy)
        push.version = version_of(push.version - 1)

        def start(member: OpenShard, version: int) -> Awaitable[t.UpdateStarted]:
            return member.calls.start_update(run_id, version, policy)

        async def stage(member: OpenShard, started: t.UpdateStarted) -> None:
            await member.calls.update_weights(started.update_id, path)

        done = await push.stage(start, stage, in_flight)
        return UpdateOutcome(
            done.policy_version, done.instances, done.aborted_samples, done.continued_samples
        )
