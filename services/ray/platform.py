"""Start, inspect and stop a platform on a Ray cluster.

    with attached(config):
        platform = RayPlatform(config)
        platform.start()
        client = paceline.Client(platform.gateway_address(), token=..., insecure=True)

Each process runs in a detached actor on its node, so the platform outlives the driver that started it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from services.platform.launching import ProcessEndpoint, read_ready_file, tied
from services.ray.config import ActorPlan, RayConfig, actors

_CALL_SECONDS = 10.0
_POLL_SECONDS = 0.2


class RayPlatformError(RuntimeError):
    """An actor, named in the message, could not be started or does not run."""


@contextmanager
def attached(config: RayConfig) -> Iterator[None]:
    """Connect to the cluster, unless this process is connected already."""
    if ray.is_initialized():
        yield
        return
    ray.init(config.ray_address, namespace=config.ray_namespace, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


class RayPlatform:
    """Actors found by their names, so that any driver can start, inspect and stop the platform."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._plans = actors(config)

    def start(self) -> None:
        """Start missing actors and wait until every process is ready; RayPlatformError if one is not."""
        if not self._config.model and self._config.instances:
            raise RayPlatformError("model: is not set")
        deadline = time.monotonic() + self._config.start_seconds
        handles = [(plan.name, self._start(plan)) for plan in self._plans]
        for name, handle in handles:
            self._ready(name, handle, max(1.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Stop every process, the gateway first, and end its actor."""
        for plan in reversed(self._plans):
            handle = self.actor(plan.name)
            if handle is None:
                continue
            try:
                wait = self._config.stop_seconds
                ray.get(handle.stop.remote(wait), timeout=wait + _CALL_SECONDS)
            except ray.exceptions.RayError:
                pass  # it is dead or does not answer; `ray.kill` ends it permanently
            ray.kill(handle, no_restart=True)

    def actor(self, name: str) -> Any:
        """Return the handle of an actor; None if it does not exist."""
        try:
            return ray.get_actor(name, namespace=self._config.ray_namespace)
        except ValueError:
            return None

    def processes(self) -> dict[str, ProcessEndpoint | None]:
        """Return the endpoint of each actor's process; None if it is not ready."""
        found: dict[str, ProcessEndpoint | None] = {}
        for plan in self._plans:
            found[plan.name] = None
            with suppress(RayPlatformError):
                found[plan.name] = self._ready(plan.name, self.actor(plan.name), 0.0)
        return found

    def gateway_address(self) -> str:
        """Return host:port for `paceline.Client`. RayPlatformError if there is no gateway."""
        return self._ready("gateway", self.actor("gateway"), _CALL_SECONDS).address

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

    def _ready(self, name: str, handle: Any, seconds: float) -> ProcessEndpoint:
        """Return the endpoint of an actor's process once ready, within `seconds`; polls at least once."""
        if handle is None:
            raise RayPlatformError(f"{name}: is not started")
        deadline = time.monotonic() + seconds
        while True:
            reason = "its process is not ready"
            try:
                ready: ProcessEndpoint | None = ray.get(handle.ready.remote(), timeout=_CALL_SECONDS)
                if ready is not None:
                    return ready
            except ray.exceptions.ActorUnavailableError as error:
                reason = str(error)  # Ray is restarting it
            except ray.exceptions.GetTimeoutError:
                reason = "there is no room for it on the cluster, or it does not answer"
            except ray.exceptions.RayError as error:
                raise RayPlatformError(f"{name}: {error}") from error
            if time.monotonic() > deadline:
                raise RayPlatformError(f"{name}: {reason}")
            time.sleep(_POLL_SECONDS)


class ServiceActor:
    """One process and its actor; Ray starts both again when either dies.

    The process keeps its name, so that it takes the next epoch; the registry announces its new address.
    """

    def __init__(self, module: str, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `python -m module`; its output is the actor's."""
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-ray-"))
        self._ready_file = self._folder / "ready.json"
        self._stopping = False
        settings = dict(environment)
        if settings.get("PACELINE_HOST") in ("0.0.0.0", "::"):
            settings["PACELINE_ADVERTISE_HOST"] = ray.util.get_node_ip_address()
        # For an engine that joins the cluster.
        settings["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", module, *flags, f"--ready-file={self._ready_file}"]
        # The process dies with the thread that starts it: this one, which ends with the actor.
        self._process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1", **settings}
        )
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def ready(self) -> ProcessEndpoint | None:
        """Return the endpoint of the process, None before it is ready; never wait, since other calls queue."""
        return read_ready_file(self._ready_file)

    def stop(self, seconds: float) -> int:
        """Terminate the process as Kubernetes would, kill it after `seconds`, and return its exit status."""
        self._stopping = True
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        self._process.wait()
        if not self._stopping:
            shutil.rmtree(self._folder, ignore_errors=True)
            # An exception would leave an actor without a process; Ray must restart both.
            os._exit(1)
