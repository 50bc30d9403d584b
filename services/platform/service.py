"""Run a service: its process, and its gRPC server with an entry in the registry.

`run` reads the configuration and sets up logs, metrics, event loop, signals and exit status. `RegisteredServer` is
a gRPC server that others find in the registry, with background work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.errors import how_to_install
from services.platform.config import ConfigError, ServiceConfig, load_config
from services.platform.grpc.server import GrpcServer, stop_servers
from services.platform.launching import write_ready_file
from services.platform.observability import tracing
from services.platform.observability.event_loop import MeteredLoop
from services.platform.observability.http_ports import start_metrics_server
from services.platform.observability.logs import configure_logging
from services.platform.observability.metrics import show_build
from services.platform.redis.connection import OUTAGES, Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from services.platform.security.certificates import Unreadable
from services.platform.tasks import end, until_one_ends

log = structlog.get_logger(__name__)

C = TypeVar("C", bound=ServiceConfig)

FAILED = 1
"""Exit status after an error."""
LEADING, STANDBY = "serving", "standby"
"""States of a record in the registry. A standby is as healthy as the leader."""


class Shutdown:
    """Request to stop a service, and the service's report that it is ready."""

    def __init__(self, metrics_port: int = 0, ready_file: Path | None = None) -> None:
        self.requested = asyncio.Event()
        self.reason: str | None = None
        self.metrics_port = metrics_port
        self._ready_file = ready_file

    def request(self, reason: str) -> None:
        """Request the service to stop; the first reason is kept."""
        if not self.requested.is_set():
            self.reason = reason
            self.requested.set()

    async def wait(self) -> str:
        """Wait for the request to stop, and return its reason."""
        await self.requested.wait()
        return self.reason or ""

    def ready(self, address: str, metrics_port: int | None = None) -> None:
        """Report that the service takes calls at `address`, in the log and in the ready file if configured."""
        port = self.metrics_port if metrics_port is None else metrics_port
        log.info("ready", address=address, metrics_port=port)
        if self._ready_file is not None:
            write_ready_file(self._ready_file, address, port)


class Served(Protocol):
    """Server of a process: `start`, then `run` until cancelled, then `stop`."""

    @property
    def address(self) -> str: ...

    async def start(self) -> None: ...

    async def run(self) -> None: ...

    async def stop(self, grace: float) -> None: ...


async def begun(starting: Coroutine[Any, Any, object], shutdown: Shutdown) -> bool:
    """Wait for a start, which may wait for Redis; cancel it and return False if the service must stop meanwhile."""
    started = asyncio.create_task(starting, name="start")
    stopping = asyncio.create_task(shutdown.wait(), name="shutdown")
    try:
        await asyncio.wait((started, stopping), return_when=asyncio.FIRST_COMPLETED)
        done = started.done()
    finally:
        await end((started, stopping))
    if done:
        started.result()
    return done


async def serve(served: Served, config: ServiceConfig, shutdown: Shutdown) -> None:
    """Serve until `shutdown` is requested.

    An error that ends `run` earlier is raised, and running calls then get no grace.
    """
    if not await begun(served.start(), shutdown):
        await served.stop(0)
        return
    shutdown.ready(served.address)
    working = asyncio.create_task(served.run(), name="work")
    stopping = asyncio.create_task(shutdown.wait(), name="shutdown")
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    failed = working.done()
    await end((working, stopping))
    await served.stop(0 if failed else config.shutdown_grace_seconds)
    if failed:
        working.result()


def run(
    service: str,
    main: Callable[[C, Shutdown], Awaitable[None]],
    config_class: type[C],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run `main` and end the process: status 0 when it returns, 1 when it raises, 2 for bad configuration.

    SIGTERM and SIGINT set `Shutdown.requested`; `main` is expected to return soon after. A second signal
    ends the process at once.
    """
    config = load_config(config_class, argv)
    configure_logging(service, config)
    sys.exit(_run(service, main, config))


def _run(service: str, main: Callable[[C, Shutdown], Awaitable[None]], config: C) -> int:
    try:
        _remove(config.ready_file)
        start_tracing(service, config)
        show_build(service)
        with asyncio.Runner(loop_factory=MeteredLoop) as runner:
            runner.run(_main(main, config, start_metrics_server(config)))
    except (ConfigError, Unreadable) as error:
        print(error, file=sys.stderr)
        return 2
    except Exception:
        log.exception("service_failed", service=service)
        return FAILED
    finally:
        tracing.stop()
        _remove(config.ready_file)
    log.info("stopped")
    return 0


def start_tracing(service: str, config: ServiceConfig) -> None:
    """Export spans to `config.tracing_endpoint`, if it is set; ConfigError if OpenTelemetry is not installed."""
    if config.tracing_endpoint is None:
        return
    try:
        from services.platform.observability.otlp import OtlpTracer
    except ImportError as error:
        problem = f"tracing_endpoint needs the extra `tracing`: {how_to_install('tracing')} ({error})"
        raise ConfigError([problem]) from error
    tracing.start(OtlpTracer(service, config))


async def _main(main: Callable[[C, Shutdown], Awaitable[None]], config: C, metrics_port: int) -> None:
    shutdown = Shutdown(metrics_port, config.ready_file)
    _handle_signals(shutdown)
    try:
        await main(config, shutdown)
    finally:
        await stop_servers(0)


def _handle_signals(shutdown: Shutdown) -> None:
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    # A plain handler instead of the loop's, so that a second signal ends a loop that hangs.
    def handle(number: int, _frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        loop.call_soon_threadsafe(shutdown.request, signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _remove(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


class RegisteredServer:
    """A gRPC server with a registration and background work.

    Usage: add servicers to `server.server` and work to `work`; `start`, then `run` until cancelled, then `stop`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        service: str,
        instance_id: str,
        *,
        metrics_port: int = 0,
        registry: CollectorRegistry | None = None,
        state: str = LEADING,
    ) -> None:
        """`service` and `instance_id` name the record in the registry, and `state` is its first state."""
        self.server = GrpcServer(config, service=service, registry=registry)
        self.redis: Redis = connect(config)
        self.work: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._keys = Keys(config.namespace)
        self._record = InstanceRecord(service=service, instance_id=instance_id, state=state)
        self._metrics_port = metrics_port
        self._registration: Registration | None = None

    @property
    def address(self) -> str:
        """ "host:port" as peers dial it, once started."""
        return self.server.address

    async def start(self) -> None:
        """Open the port and register, which waits for Redis in an outage with health NOT_SERVING."""
        await self.server.start()
        record = replace(
            self._record,
            address=self.address,
            metrics_address=f"{self.address.rpartition(':')[0]}:{self._metrics_port}",
        )
        self._registration = Registration(self.redis, self._keys, record, reachable=self.server.set_store)
        await self._registration.register()
        await self.server.set_serving(True)

    async def run(self) -> None:
        """Send heartbeats and run the work, until cancelled or one of them ends.

        Raises the errors of the work, and FailedPrecondition if another process has registered under the name.
        """
        assert self._registration is not None, "it was started"
        works = (self._registration.run, *self.work)
        await until_one_ends([asyncio.create_task(work()) for work in works])

    async def set_state(self, state: str) -> None:
        """Change the state of the record, now or with a later heartbeat."""
        if self._registration is not None:
            with contextlib.suppress(RedisError):
                await self._registration.update(state=state)

    async def stop(self, grace: float) -> None:
        """Leave the registry and close the port."""
        await self.server.set_serving(False)
        if self._registration is not None:
            with contextlib.suppress(*OUTAGES):
                await self._registration.deregister()
        await self.server.stop(grace)
        await self.redis.aclose()
