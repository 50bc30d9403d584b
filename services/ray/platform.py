"""The platform on Ray, from a driver's side. The actors are detached: they outlive whoever started them.

with attached(config):
    platform = RayPlatform(config)
    platform.start()
    client = paceline.Client(platform.gateway_address(), token=...)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from services.ray.actor import Ready, ServiceActor
from services.ray.config import RayConfig
from services.ray.plan import ActorPlan, actors

_CALL_SECONDS = 10.0
_POLL_SECONDS = 0.2


class RayPlatformError(RuntimeError):
    """The platform could not be started, or is not there; the message says which part of it."""


@contextmanager
def attached(config: RayConfig) -> Iterator[None]:
    """A connection to the cluster, unless this process has one already."""
    if ray.is_initialized():
        yield
        return
    ray.init(config.ray_address, namespace=config.ray_namespace, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


class RayPlatform:
    """Finds its actors by name, so that any driver can start it, look at it and stop it."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._plans = actors(config)

    def start(self) -> None:
        """Starts what is not there yet; returns when every process is ready. RayPlatformError when one is not."""
        if not self._config.model and self._config.instances:
            raise RayPlatformError("model: is not set")
        deadline = time.monotonic() + self._config.start_seconds
        handles = [(plan.name, self._start(plan)) for plan in self._plans]
        for name, handle in handles:
            self._ready(name, handle, max(1.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Ends every process, the gateway first, and its actor."""
        for plan in reversed(self._plans):
            handle = self.actor(plan.name)
            if handle is None:
                continue
            try:
                wait = self._config.stop_seconds
                ray.get(handle.stop.remote(wait), timeout=wait + _CALL_SECONDS)
            except ray.exceptions.RayError:
                pass  # it is dead, or does not answer: what follows ends it for good
            ray.kill(handle, no_restart=True)

    def actor(self, name: str) -> Any:
        """The handle of an actor; None when there is no such actor."""
        try:
            return ray.get_actor(name, namespace=self._config.ray_namespace)
        except ValueError:
            return None

    def processes(self) -> dict[str, Ready | None]:
        """What each actor's process said when it was ready; None where there is none now."""
        found: dict[str, Ready | None] = {}
        for plan in self._plans:
            handle = self.actor(plan.name)
            try:
                found[plan.name] = None if handle is None else self._ready(plan.name, handle, 0.0)
            except RayPlatformError:
                found[plan.name] = None
        return found

    def gateway_address(self) -> str:
        """host:port for `paceline.Client`. RayPlatformError when there is no gateway."""
        handle = self.actor("gateway")
        if handle is None:
            raise RayPlatformError("gateway: is not started")
        return self._ready("gateway", handle, _CALL_SECONDS).address

    def _start(self, plan: ActorPlan) -> Any:
        actor_class: Any = ray.remote(ServiceActor)
        made = actor_class.options(
            name=plan.name,
            namespace=self._config.ray_namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=plan.cpus,
            num_gpus=plan.gpus,
            resources=dict(plan.resources),
            scheduling_strategy="SPREAD" if plan.spread else "DEFAULT",
        )
        return made.remote(plan.module, plan.flags, self._config.environment())

    def _ready(self, name: str, handle: Any, seconds: float) -> Ready:
        """What its process said when it was ready, within so many seconds; asked once at least."""
        deadline = time.monotonic() + seconds
        while True:
            reason = "its process is not ready"
            try:
                ready: Ready | None = ray.get(handle.ready.remote(), timeout=_CALL_SECONDS)
                if ready is not None:
                    return ready
            except ray.exceptions.ActorUnavailableError as error:
                reason = str(error)  # it is being started again
            except ray.exceptions.GetTimeoutError:
                reason = "there is no room for it on the cluster, or it does not answer"
            except ray.exceptions.RayError as error:
                raise RayPlatformError(f"{name}: {error}") from error
            if time.monotonic() > deadline:
                raise RayPlatformError(f"{name}: {reason}")
            time.sleep(_POLL_SECONDS)
