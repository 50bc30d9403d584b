"""The gRPC server of a service: credentials, interceptor, health and reflection in one place."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, CollectorRegistry

from services.platform.config import ConfigError, ServiceConfig, listening_problems
from services.platform.guard import guard_of
from services.platform.interceptor import CallInterceptor
from services.platform.metrics import rpc_metrics
from services.platform.transport import server_credentials, server_options

LIVENESS = "liveness"
"""Name under which health says SERVING from start to stop, whether or not the service can take work."""

WATCHER_GRACE = 0.1
"""Seconds that watchers of health get to hear that it is over; they never end by themselves."""

_WILDCARDS = ("0.0.0.0", "::", "[::]")
_running: set[GrpcServer] = set()


class GrpcServer:
    """One listening server.

    Usage: `add_XServicer_to_server(servicer, grpc_server.server)`, `await start()`, and once work can be
    taken `await set_serving(True)`; `await stop(grace)` at the end. Until told otherwise health answers
    NOT_SERVING.
    """

    def __init__(
        self, config: ServiceConfig, *, service: str, registry: CollectorRegistry | None = None
    ) -> None:
        self._config = config
        metrics = rpc_metrics(REGISTRY if registry is None else registry)
        self._interceptor = CallInterceptor(service, guard_of(config), metrics)
        self.server = _NamingServer(
            grpc.aio.server(interceptors=[self._interceptor], options=server_options(config))
        )
        self.port = 0
        self._health = health.aio.HealthServicer()

    @property
    def address(self) -> str:
        """ "host:port" as peers should dial it; the port is known after `start`."""
        return f"{_advertised(self._config)}:{self.port}"

    async def start(self) -> None:
        """Binds and serves. ConfigError when the address is not allowed, RuntimeError when it is taken."""
        if problems := listening_problems(self._config):
            await self._end_unused()
            raise ConfigError(problems)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection([*self.server.names, reflection.SERVICE_NAME], self.server)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)
        try:
            self.port = self._bind(f"{_bracketed(self._config.host)}:{self._config.port}")
        except RuntimeError:
            await self._end_unused()
            raise
        await self.server.start()
        _running.add(self)

    async def _end_unused(self) -> None:
        """A server that never ran can crash the process when it is collected: it logs itself then."""
        await self.server.start()
        await self.server.stop(0)

    async def set_serving(self, serving: bool) -> None:
        """What health answers for the server as a whole ("") and for every service on it."""
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        for name in ("", *self.server.names):
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Ends: health says NOT_SERVING, new calls are refused, running ones get `grace` seconds."""
        _running.discard(self)
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self.server.stop(grace))
        await asyncio.wait([stopping], timeout=WATCHER_GRACE)
        self._interceptor.end_watchers()
        await stopping

    def _bind(self, address: str) -> int:
        if self._config.tls is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, server_credentials(self._config.tls))


async def stop_servers(grace: float) -> None:
    """Stops every server of the process that still runs: one left behind keeps the process from ending."""
    await asyncio.gather(*(server.stop(grace) for server in list(_running)))


class _NamingServer(grpc.aio.Server):
    """A server that knows the names of the services added to it, for health and reflection."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.names: list[str] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = list(generic_rpc_handlers)
        for handler in handlers:
            if isinstance(handler, grpc.ServiceRpcHandler) and handler.service_name() not in self.names:
                self.names.append(handler.service_name())
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        self._server.add_registered_method_handlers(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        return self._server.add_insecure_port(address)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        return self._server.add_secure_port(address, server_credentials)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        await self._server.stop(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        return await self._server.wait_for_termination(timeout)


def _advertised(config: ServiceConfig) -> str:
    if config.advertise_host is not None:
        return _bracketed(config.advertise_host)
    if config.host in _WILDCARDS:
        return _bracketed(socket.gethostbyname(socket.gethostname()))
    return _bracketed(config.host)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
