"""The model and the state of the fleet, as the gateway tells them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from paceline import AsyncClient
from paceline import types as t
from paceline.errors import PacelineError, UnavailableError

HEALTH_SECONDS = 5.0
"""Deadline of what a probe asks."""
HEALTH_KEPT_SECONDS = 1.0
"""Seconds for which probes are answered from what the gateway said: thousands cost it what one does."""
VERSION_SECONDS = 1.0
"""Seconds for which requests begin under the name of a version that was published."""
_LIVE = (t.InstanceState.SERVING, t.InstanceState.PAUSED)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the instances serve."""

    name: str
    max_model_len: int
    vocab_size: int


class ServedFleet:
    """Fleet as requests see it: its model, instances and policy version."""

    def __init__(self, client: Callable[[], AsyncClient], name: str | None) -> None:
        """`name` replaces the model's own."""
        self._client = client
        self._name = name
        self._model: ServedModel | None = None
        self._recent, self._recent_until = 0, -math.inf
        self._asking: asyncio.Task[int] | None = None
        self._health: _Health | None = None

    async def model(self) -> ServedModel:
        """Return the model, which stays the same. UnavailableError: no instance is known."""
        if self._model is None:
            self._model = served_model(await self._client().instances(), self._name)
        return self._model

    async def instances(self) -> tuple[t.Instance, ...]:
        """Return the instances; DeadlineExceededError or another error soon, for a probe."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return await self._client().instances()
        except TimeoutError:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "the gateway does not answer") from None

    async def policy_version(self) -> int:
        """Return the published version of the weights."""
        return (await self._client().versions()).policy_version

    async def recent_version(self) -> int:
        """Return the version that is published, or was within the last second: thousands of requests ask once."""
        if time.monotonic() < self._recent_until:
            return self._recent
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self.policy_version())
        # Who asks first may leave.
        version = await asyncio.shield(self._asking)
        if time.monotonic() >= self._recent_until:
            self.published(version)
        return version

    def published(self, version: int) -> None:
        """Note the version that is published now."""
        self._recent, self._recent_until = version, time.monotonic() + VERSION_SECONDS

    async def problem(self, *, needs_instance: bool) -> str:
        """Return why requests cannot be served now; empty if they can. It may be a second old."""
        health = self._health
        if health is None or time.monotonic() >= health.until:
            # One asks at a time. Who asked first may leave.
            health = self._health = _Health(asyncio.create_task(self._look()))
            health.asked.add_done_callback(health.keep)
        return (await asyncio.shield(health.asked))[needs_instance]

    async def _look(self) -> tuple[str, str]:
        """Return the problem without regard to instances, and the one with."""
        try:
            instances = await self.instances()
        except PacelineError as error:
            return error.message, error.message
        return "", "" if any(each.state in _LIVE for each in instances) else "no instance serves"


class _Health:
    """What the gateway said, or is being asked."""

    def __init__(self, asked: asyncio.Task[tuple[str, str]]) -> None:
        self.asked = asked
        self.until = math.inf

    def keep(self, asked: asyncio.Task[tuple[str, str]]) -> None:
        failed = asked.cancelled() or asked.exception() is not None
        self.until = time.monotonic() + (0.0 if failed else HEALTH_KEPT_SECONDS)


def served_model(instances: Sequence[t.Instance], name: str | None) -> ServedModel:
    """Return the model of the instances: the least of their lengths and of their vocabularies."""
    if not instances:
        raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "no instance has registered yet")
    return ServedModel(
        name or instances[0].model,
        min(each.max_model_len for each in instances),
        min(each.vocab_size for each in instances),
    )
