"""The whole platform on this machine, as processes: Redis, draft stores, bubble coordinator, policy service,
reallocator, online learner if there is to be one, instances and gateway.

    with Platform(PlatformConfig(model=Path("examples/tinymath/model"))) as platform:
        client = platform.client()

Start it from the main thread. When the launcher dies, by whatever signal, its processes die with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from paceline import Client, PacelineError, RetryPolicy
from paceline.types import InstanceState
from services.local import pinning, specs
from services.local.child import (
    Child,
    ChildSpec,
    Launch,
    PlatformError,
    Ready,
    spawned,
    stop_together,
)
from services.local.config import PlatformConfig
from services.local.first_drafter import first_drafter
from services.local.keeper import Keeper
from services.local.targets import TargetsFile
from services.platform.embedded_redis import EmbeddedRedis

_POLL_SECONDS = 0.1

__all__ = ["Platform", "PlatformError"]


class Platform:
    """Starts in `__enter__`, stops in `__exit__`: gateway first, then the instances, then what they use."""

    def __init__(self, config: PlatformConfig, *, launch: Launch = spawned) -> None:
        """`launch` starts the processes."""
        self.config = config
        self._launch = launch
        self.gateway: Child | None = None
        self.instances: list[Child] = []
        self.draft_stores: list[Child] = []
        self.bubbles: Child | None = None
        self.policy: Child | None = None
        self.reallocator: Child | None = None
        self.learner: Child | None = None
        self._drafter: Path | None = None
        self.redis: EmbeddedRedis | None = None
        self._redis_url = ""
        self._state = Path()
        # One thread starts all processes: each dies with the thread that started it.
        self._spawner = ThreadPoolExecutor(1, "spawner")
        self._stopping = threading.Event()
        self._keeper: Keeper | None = None
        self._targets = TargetsFile(config.folder)
        self._on_purpose: set[str] = set()
        """Names of processes that were killed by a caller and are to stay dead."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts everything and returns when every instance serves; on failure nothing is left running."""
        deadline = time.monotonic() + self.config.start_timeout
        try:
            self._start(deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends every process in order; harmless when it was done before."""
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.stop()
        for group in _given(self.gateway), self.instances, self._helpers:
            stop_together(group, self.config.stop_timeout)
        if self.redis is not None:
            self.redis.stop()
        self._spawner.shutdown()
        if self._state != Path():
            shutil.rmtree(self._state, ignore_errors=True)

    @property
    def gateway_address(self) -> str:
        """host:port for `paceline.Client`."""
        return self._ready(self.gateway).address

    @property
    def redis_url(self) -> str:
        """The store's address."""
        return self._redis_url

    @property
    def processes(self) -> list[Child]:
        """The gateway, the instances, the draft stores, the bubble coordinator, the policy service, the reallocator
        and the learner."""
        return _given(self.gateway) + self.instances + self._helpers

    def client(self, *, retry: RetryPolicy | None = None) -> Client:
        """A new SDK client on the gateway."""
        return Client(self.gateway_address, token=self.config.token, tls=self.config.tls, retry=retry)

    def kill(self, index: int) -> None:
        """Kills an instance as a crash would. It comes back only if restarts are configured."""
        self._kill(self.instances[index])

    def kill_draft_store(self, index: int) -> None:
        """Kills a replica of the draft store as a crash would; as `kill`."""
        self._kill(self.draft_stores[index])

    def kill_bubbles(self) -> None:
        """Kills the bubble coordinator as a crash would; as `kill`."""
        self._kill(self._started(self.bubbles))

    def kill_policy(self) -> None:
        """Kills the policy service as a crash would; as `kill`."""
        self._kill(self._started(self.policy))

    def kill_reallocator(self) -> None:
        """Kills the reallocator as a crash would; as `kill`."""
        self._kill(self._started(self.reallocator))

    def kill_learner(self) -> None:
        """Kills the online learner as a crash would; as `kill`."""
        self._kill(self._started(self.learner))

    def remove(self, index: int) -> None:
        """Stops an instance for good, cleanly, as a scale-down would."""
        child = self.instances[index]
        self._on_purpose.add(child.spec.name)
        child.stop(self.config.stop_timeout)

    def restart_instance(self, index: int, *, wait: bool = True) -> None:
        """Starts an instance again under its id, after it died or was removed; waits until it serves."""
        child = self.instances[index]
        self._on_purpose.add(child.spec.name)
        child.stop(self.config.stop_timeout)
        child.start()
        self._on_purpose.discard(child.spec.name)
        if wait:
            deadline = time.monotonic() + self.config.start_timeout
            child.wait_ready(deadline)
            self._write_targets()
            self.wait_serving(len(self._wanted(self.instances)), deadline)

    def restart_gateway(self, *, kill: bool = False) -> None:
        """Replaces the gateway process, on the same port; returns when the new one takes calls."""
        self._replace(self._started(self.gateway), kill)

    def restart_draft_store(self, index: int, *, kill: bool = False) -> None:
        """Replaces a replica of the draft store; returns when the new one has its snapshot and takes calls."""
        self._replace(self.draft_stores[index], kill)

    def restart_bubbles(self, *, kill: bool = False) -> None:
        """Replaces the bubble coordinator; returns when the new one takes calls."""
        self._replace(self._started(self.bubbles), kill)

    def restart_policy(self, *, kill: bool = False) -> None:
        """Replaces the policy service; returns when the new one takes calls."""
        self._replace(self._started(self.policy), kill)

    def restart_reallocator(self, *, kill: bool = False) -> None:
        """Replaces the reallocator; returns when the new one is ready."""
        self._replace(self._started(self.reallocator), kill)

    def restart_learner(self, *, kill: bool = False) -> None:
        """Replaces the online learner; returns when the new one takes calls."""
        self._replace(self._started(self.learner), kill)

    def check(self) -> None:
        """PlatformError with the end of its log when a process is gone and will not be started again."""
        for child in self._wanted(self.processes):
            if self._keeper is None or self._keeper.gave_up(child):
                child.check_alive()

    def wait_serving(self, count: int, deadline: float) -> None:
        """Returns when the gateway says that `count` instances serve; PlatformError at the deadline."""
        with self.client() as client:
            while (serving := _serving(client)) < count:
                self.check()
                if time.monotonic() > deadline:
                    raise PlatformError(f"{serving} of {count} instances serve.\n{self._tails()}")
                self._stopping.wait(_POLL_SECONDS)

    def _start(self, deadline: float) -> None:
        config = self.config
        if not (config.model / "config.json").is_file():
            raise PlatformError(f"{config.model} is not a model folder: it has no config.json")
        self._state = Path(tempfile.mkdtemp(prefix="paceline-"))
        shutil.rmtree(config.logs, ignore_errors=True)
        self._redis_url = config.redis_url or self._start_redis()
        self.draft_stores = [
            self._child(specs.draft_store_spec(config, self._state, self._redis_url, index))
            for index in range(config.draft_stores)
        ]
        if config.bubbles:
            self.bubbles = self._child(specs.bubbles_spec(config, self._state, self._redis_url))
        if config.policy:
            self.policy = self._child(specs.policy_spec(config, self._state, self._redis_url))
        if config.reallocator:
            self.reallocator = self._child(specs.reallocator_spec(config, self._state, self._redis_url))
        if config.learner:
            self._drafter = config.drafter or first_drafter(config.model, config.drafters / "first")
            spec = specs.learner_spec(config, self._state, self._redis_url, self._drafter)
            self.learner = self._child(spec)
        self.instances = [self._instance(index) for index in range(config.instances)]
        self.gateway = self._child(specs.gateway_spec(config, self._state, self._redis_url, config.port))
        for child in (*self._helpers, *self.instances, *_given(self.gateway)):
            child.start()
        for child in self.processes:
            child.wait_ready(deadline, self.check)
        self._keep_port()
        self._write_targets()
        self.wait_serving(config.instances, deadline)
        if config.restarts is not None:
            self._keeper = Keeper(config.restarts, lambda: self._wanted(self.processes), self._write_targets)
            self._keeper.start()

    def _start_redis(self) -> str:
        shutil.rmtree(self.config.snapshots, ignore_errors=True)
        shutil.rmtree(self.config.drafters, ignore_errors=True)
        self.redis = EmbeddedRedis(self._state / "redis")
        return self.redis.start()

    def _instance(self, index: int) -> Child:
        config = self.config
        cores: tuple[int, ...] = ()
        environment: dict[str, str] = {}
        if config.device == "cuda" or (config.device == "auto" and _gpus()):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment = pinning.cuda_environment(visible, max(1, _gpus()), index)
        elif config.pin:
            cores = pinning.share_cores(_cores(), config.instances, index)
            environment = pinning.cpu_environment(cores)
        return self._child(
            specs.instance_spec(
                config, self._state, self._redis_url, index, environment, cores, self._drafter
            )
        )

    @property
    def _helpers(self) -> list[Child]:
        services = (self.bubbles, self.policy, self.reallocator, self.learner)
        return self.draft_stores + [child for child in services if child is not None]

    def _child(self, spec: ChildSpec) -> Child:
        return Child(spec, self._spawner, self._launch)

    def _kill(self, child: Child) -> None:
        if self._keeper is None:
            self._on_purpose.add(child.spec.name)
        child.kill()

    def _replace(self, child: Child, kill: bool) -> None:
        """Stops a process and starts it again; returns when it is ready."""
        self._on_purpose.add(child.spec.name)
        child.stop(0.0 if kill else self.config.stop_timeout)
        child.start()
        self._on_purpose.discard(child.spec.name)
        child.wait_ready(time.monotonic() + self.config.start_timeout)
        self._write_targets()

    def _write_targets(self) -> None:
        """Tells Prometheus where metrics are now."""
        self._targets.write(self.processes, tls=self.config.tls is not None)

    def _started(self, child: Child | None) -> Child:
        if child is None:
            raise PlatformError("the platform is not started, or not configured to have this process")
        return child

    def _keep_port(self) -> None:
        """From now on the gateway starts on the port that it has."""
        port = int(self.gateway_address.rpartition(":")[2])
        self._started(self.gateway).spec = specs.gateway_spec(self.config, self._state, self._redis_url, port)

    def _wanted(self, children: Sequence[Child]) -> list[Child]:
        """Those that nobody took down on purpose."""
        return [child for child in children if child.spec.name not in self._on_purpose]

    def _tails(self) -> str:
        return "\n".join(child.tail() for child in self.processes)

    def _ready(self, child: Child | None) -> Ready:
        if child is None or child.ready is None:
            raise PlatformError("the platform is not started")
        return child.ready


def _given(child: Child | None) -> list[Child]:
    return [] if child is None else [child]


def _serving(client: Client) -> int:
    try:
        return sum(instance.state is InstanceState.SERVING for instance in client.instances())
    except PacelineError:
        return 0


def _cores() -> list[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _gpus() -> int:
    """NVIDIA GPUs of this machine, counted without starting CUDA."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
