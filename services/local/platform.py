"""Local platform: all services as processes of this machine.

    with Platform(PlatformConfig(model=Path("examples/tinymath/model"))) as platform:
        client = platform.client()

Start it from the main thread. When the launcher dies, by whatever signal, its processes die with it. Every process
requires the platform's token, so that other users of this machine can neither read samples nor change weights. The
token is new at every start unless the environment or the caller gives one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from paceline import Client, PacelineError, RetryPolicy
from paceline.files import NotPrivateError, private_folder, write_private
from paceline.tokens import new_token
from paceline.transport.options import TOKEN, TOKEN_FILE, token_file_of, token_of_environment
from paceline.types import InstanceState
from services.local.child import (
    Child,
    Launch,
    LogRotation,
    PlatformError,
    ProcessSpec,
    ProgressLines,
    Supervisor,
    stop_together,
)
from services.local.config import PlatformConfig
from services.local.launch import Forks, Specs, first_drafter
from services.local.machine import is_taken, share_of_machine
from services.platform.redis.embedded import EmbeddedRedis

__all__ = ["Platform", "PlatformError"]

TARGETS_FILE = "targets.json"
"""File in the platform's folder by which Prometheus finds the processes (deploy/prometheus/prometheus.yml)."""
TOKEN_NAME = "token"
"""File in the platform's folder with its token."""
_POLL_SECONDS = 0.1


class Platform:
    """Redis, draft stores, bubble coordinator, policy service, reallocator, learner, instances, gateways, facade.

    Starts in `__enter__`, stops in `__exit__`. Processes are named gateway, gateway-1, instance-0, drafts-0,
    bubbles, policy, reallocator, drafter (the learner) and facade.
    """

    def __init__(
        self,
        config: PlatformConfig,
        *,
        launch: Launch | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare a platform.

        Args:
            launch: starts the processes; None: `Forks`.
            report: gets a line as each process becomes ready, and a line on what is awaited after ten seconds
                without one. None: nothing is reported, and no thread watches the start.

        Raises:
            PlatformError: the token cannot be read, or contradicts `no_token`.
        """
        self.config = config = with_token(config, os.environ)
        """Configuration as given, with the token that all processes require."""
        self.redis: EmbeddedRedis | None = None
        self.redis_url = ""
        """Address of the store, once started."""
        self._gateway_address = ""
        self._http_address = ""
        self._forks = Forks(config)
        self._launch = launch or self._forks
        self._report = report
        self._children: dict[str, Child] = {}
        """By name, in starting order."""
        self._state = Path()
        # A process dies with the thread that started it, so one thread starts them all.
        self._spawner = ThreadPoolExecutor(1, "spawner")
        self._stopping = threading.Event()
        self._supervisor: Supervisor | None = None
        self._targets = TargetsFile(config.folder)
        self._tokens = TokenFiles(config.folder, config.token)
        self._rotation = LogRotation(self._logs, config.log_bytes, config.log_files)
        self._stopped_by_caller: set[str] = set()
        """Names of processes that a caller stopped, and that must not be restarted."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes and return when every instance serves; on failure stop them all."""
        began = time.monotonic()
        try:
            with self._watched(began):
                self._start(began + self.config.start_timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the facade, the gateways, the instances, and then the rest; may be called again."""
        self._stopping.set()
        if self._supervisor is not None:
            self._supervisor.stop()
        front = (self._named("facade"), self.gateways, self.instances)
        rest = [each for each in self.processes if not any(each in group for group in front)]
        for group in (*front, rest):
            stop_together(group, self.config.stop_timeout)
        if self.redis is not None:
            self.redis.stop()
        self._rotation.stop()
        self._tokens.remove()
        # Before the spawner, whose thread may be waiting for a fork.
        self._forks.close()
        self._spawner.shutdown()
        if self._state != Path():
            shutil.rmtree(self._state, ignore_errors=True)

    @property
    def gateway_address(self) -> str:
        """Address for `paceline.Client`: host:port of each gateway, separated by commas."""
        if not self._gateway_address:
            raise PlatformError("the platform is not started")
        return self._gateway_address

    @property
    def token_file(self) -> Path:
        """File with the token of this platform, readable by this user only; empty if no token is required."""
        return self._tokens.path

    @property
    def http_address(self) -> str:
        """URL of the HTTP facade, once started; empty without one."""
        return self._http_address

    @property
    def processes(self) -> list[Child]:
        """All processes: the gateways, the instances, and then the rest."""
        rank = {"gateway": 0, "instance": 1}
        return sorted(self._children.values(), key=lambda each: rank.get(each.spec.name.split("-")[0], 2))

    @property
    def gateways(self) -> list[Child]:
        """Gateways in the order of their numbers."""
        return self._named("gateway")

    @property
    def instances(self) -> list[Child]:
        """Generation instances in the order of their numbers."""
        return self._named("instance-")

    def process(self, name: str) -> Child:
        """Return a process by its name; PlatformError if it is not started or not configured."""
        if name not in self._children:
            raise PlatformError(
                f"{name}: the platform is not started, or not configured to have this process"
            )
        return self._children[name]

    def client(self, *, retry: RetryPolicy | None = None) -> Client:
        """Return a new SDK client on the gateway."""
        return Client(self.gateway_address, token=self.config.token or "", tls=self.config.tls, retry=retry)

    def kill(self, name: str) -> None:
        """Kill a process as a crash would; it is restarted only if restarts are configured."""
        child = self.process(name)
        if self._supervisor is None:
            self._stopped_by_caller.add(name)
        child.kill()

    def remove(self, name: str) -> None:
        """Stop a process permanently and cleanly, as a scale-down would."""
        child = self.process(name)
        self._stopped_by_caller.add(name)
        child.stop(self.config.stop_timeout)

    def restart(self, name: str, *, kill: bool = False) -> None:
        """Replace a process under its name, a gateway on its port, and return when the new one takes calls.

        With `kill` the running one ends as in a crash. For an instance, wait until the gateway uses it.
        """
        child = self.process(name)
        self._stopped_by_caller.add(name)
        child.stop(0.0 if kill else self.config.stop_timeout)
        child.start()
        self._stopped_by_caller.discard(name)
        deadline = time.monotonic() + self.config.start_timeout
        child.wait_ready(deadline)
        self._write_targets()
        if child in self.instances:
            self.wait_serving(sum(each in self.instances for each in self._expected()), deadline)

    def check(self) -> None:
        """Raise PlatformError with the end of the log if a process has ended and will not be restarted."""
        for child in self._expected():
            if self._supervisor is None or self._supervisor.gave_up(child):
                child.check_alive()

    def wait_serving(self, count: int, deadline: float) -> None:
        """Wait until the gateway reports `count` serving instances; PlatformError at the deadline (monotonic)."""
        with self.client() as client:
            while (serving := _serving(client)) < count:
                self.check()
                if time.monotonic() > deadline:
                    logs = "\n".join(child.tail() for child in self.processes)
                    raise PlatformError(f"{serving} of {count} instances serve.\n{logs}")
                self._stopping.wait(_POLL_SECONDS)

    def _start(self, deadline: float) -> None:
        config = self.config
        if not (config.model / "config.json").is_file():
            raise PlatformError(f"{config.model} is not a model folder: it has no config.json")
        self._state = Path(tempfile.mkdtemp(prefix="paceline-"))
        self.redis_url = config.redis_url or self._start_redis()
        self._make_folders()
        self._tokens.write()
        if config.port and not is_taken(config.port):
            # Before the gateway serves, so that clients of an earlier platform find the new token in time.
            self._tokens.announce([config.port])
        self._rotation.start()
        specs = Specs(config, self._state, self.redis_url)
        listed = self._specs(specs)
        if self._launch is self._forks:
            self._forks.preload(listed)
        for spec in listed:
            self._children[spec.name] = Child(spec, self._spawner, self._launch)
        for child in self._children.values():
            child.start()
        for child in self.processes:
            child.wait_ready(deadline, self.check)
        addresses = [child.wait_ready(deadline).address for child in self.gateways]
        self._gateway_address = ",".join(addresses)
        # Restarted gateways keep their ports.
        for index, (child, address) in enumerate(zip(self.gateways, addresses, strict=True)):
            child.spec = specs.gateway(int(address.rpartition(":")[2]), index)
        self._tokens.announce(int(address.rpartition(":")[2]) for address in addresses)
        if config.http_port is not None:
            self._start_facade(specs, config.http_port, deadline)
        self._write_targets()
        self.wait_serving(config.instances, deadline)
        if config.restarts is not None:
            self._supervisor = Supervisor(config.restarts, self._expected, self._write_targets)
            self._supervisor.start()

    def _watched(self, began: float) -> AbstractContextManager[object]:
        if self._report is None:
            return nullcontext()
        return ProgressLines(self._report, began, self._ready_names, self._awaited)

    def _ready_names(self) -> list[str]:
        return [child.spec.name for child in list(self._children.values()) if child.ready is not None]

    def _awaited(self) -> list[str]:
        """Name the processes that are not ready, or else what the start waits for."""
        children = list(self._children.values())
        names = [child.spec.name for child in children if child.ready is None]
        return names or ["the gateway to find its instances" if children else "what they start from"]

    def _start_facade(self, specs: Specs, port: int, deadline: float) -> None:
        child = Child(specs.facade(port, self._gateway_address), self._spawner, self._launch)
        self._children[child.spec.name] = child
        child.start()
        address = child.wait_ready(deadline, self.check).address
        child.spec = specs.facade(int(address.rpartition(":")[2]), self._gateway_address)
        self._http_address = f"{'http' if self.config.tls is None else 'https'}://{address}"

    def _specs(self, specs: Specs) -> list[ProcessSpec]:
        config, head = self.config, None
        ports = [config.port, *[0] * (config.gateways - 1)]
        found = [specs.gateway(port, index) for index, port in enumerate(ports)]
        found += [specs.draft_store(index) for index in range(config.draft_stores)]
        services = (
            ("bubbles", config.bubbles, config.bubble_options),
            ("policy", config.policy, config.policy_options),
            ("reallocator", config.reallocator, config.reallocator_options),
        )
        found += [specs.service(name, options) for name, configured, options in services if configured]
        if config.learner:
            head = config.drafter or first_drafter(config.model, config.drafters / "first")
            found.append(specs.learner(head))
        for index in range(config.instances):
            environment, cores = share_of_machine(config, index)
            found.append(specs.instance(index, environment, cores, head))
        return found

    def _start_redis(self) -> str:
        # These files last only as long as their Redis.
        shutil.rmtree(self.config.snapshots, ignore_errors=True)
        shutil.rmtree(self.config.drafters, ignore_errors=True)
        shutil.rmtree(self.config.adopted, ignore_errors=True)
        self.redis = EmbeddedRedis(self._state / "redis")
        return self.redis.start()

    def _make_folders(self) -> None:
        """Make the platform's folder, which has tokens and texts of the run, for this user only.

        An existing folder keeps its permissions, since it may serve other purposes; its contents do not.
        """
        config = self.config
        shutil.rmtree(config.logs, ignore_errors=True)
        config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            for folder in (config.logs, config.snapshots, config.drafters, config.adopted):
                private_folder(folder)
        except NotPrivateError as error:
            raise PlatformError(str(error)) from error

    def _logs(self) -> list[Path]:
        logs = sorted(self.config.logs.glob("*.log"))
        return logs if self.redis is None else [*logs, self.redis.log]

    def _named(self, prefix: str) -> list[Child]:
        return [child for name, child in self._children.items() if name.startswith(prefix)]

    def _expected(self) -> list[Child]:
        """Return the processes that no caller has stopped."""
        return [child for child in self.processes if child.spec.name not in self._stopped_by_caller]

    def _write_targets(self) -> None:
        self._targets.write(self.processes, tls=self.config.tls is not None)


def _serving(client: Client) -> int:
    try:
        return sum(instance.state is InstanceState.SERVING for instance in client.instances())
    except PacelineError:
        return 0


def targets(children: Iterable[Child], *, tls: bool) -> str:
    """Return the processes that are ready as targets of Prometheus, labelled with their names."""
    scheme = {"__scheme__": "https"} if tls else {}
    listed = [
        {
            "targets": [f"{child.ready.address.rpartition(':')[0]}:{child.ready.metrics_port}"],
            "labels": {"instance": child.spec.name, **scheme},
        }
        for child in children
        if child.ready is not None
    ]
    return json.dumps(listed, indent=1) + "\n"


class TargetsFile:
    """Targets file of one platform, written atomically by any thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TARGETS_FILE
        self._written = ""
        self._lock = threading.Lock()

    def write(self, children: Iterable[Child], *, tls: bool) -> None:
        """Write the file if its contents have changed."""
        with self._lock:
            text = targets(children, tls=tls)
            if text != self._written:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                part = self.path.with_suffix(".part")
                part.write_text(text)
                part.replace(self.path)
                self._written = text


def with_token(config: PlatformConfig, environment: Mapping[str, str]) -> PlatformConfig:
    """Return the configuration with the token that its processes require.

    PlatformError: `no_token` is set and a token is given, or the named file cannot be read.
    """
    given = [name for name in (TOKEN, TOKEN_FILE) if environment.get(name)]
    if config.no_token:
        if config.token or given:
            raise PlatformError(f"no_token: {'token' if config.token else given[0]} is given, too; unset one")
        return config
    if config.token:
        return config
    # Callers name this platform's own file, as `paceline up` proposes: it is missing or from an earlier platform.
    if (
        given == [TOKEN_FILE]
        and Path(environment[TOKEN_FILE]).absolute() == (config.folder / TOKEN_NAME).absolute()
    ):
        return replace(config, token=new_token())
    try:
        return replace(config, token=token_of_environment(environment) or new_token())
    except ValueError as error:
        raise PlatformError(str(error)) from error


class TokenFiles:
    """Files with the token of one platform while it runs, readable by this user only."""

    def __init__(self, folder: Path, token: str | None) -> None:
        self.path = folder / TOKEN_NAME
        """File in the platform's folder, for Prometheus and for clients over HTTP; empty without a token."""
        self._token = token or ""
        self._written: list[Path] = []

    def write(self) -> None:
        """Write the file in the platform's folder."""
        self._write(self.path)

    def announce(self, ports: Iterable[int]) -> None:
        """Write the files in which clients of these ports look for a token.

        If this user has no writable home folder, clients need the token as a setting.
        """
        if not self._token:
            return
        for port in ports:
            with suppress(OSError, RuntimeError):
                path = token_file_of(port)
                if path not in self._written:
                    private_folder(path.parent)
                    self._write(path)

    def remove(self) -> None:
        """Remove the written files that still have this platform's token."""
        for path in self._written:
            with suppress(OSError):
                if path.read_text().strip() == self._token:
                    path.unlink()
        self._written.clear()

    def _write(self, path: Path) -> None:
        write_private(path, f"{self._token}\n" if self._token else "")
        self._written.append(path)
