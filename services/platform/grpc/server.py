"""Run the gRPC server of a service, with credentials, interceptor, health and reflection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY, CollectorRegistry

from paceline.transport.channel import KEEPALIVE_MS
from services.platform.config import ConfigError, ServiceConfig, TlsConfig, listening_problems
from services.platform.grpc.channel import Options, common_options
from services.platform.grpc.interceptor import CallInterceptor
from services.platform.grpc.parse_budget import ParseBudget
from services.platform.observability.http_ports import ProbeServer
from services.platform.observability.metrics import rpc_metrics
from services.platform.security.certificates import Certificates, watch_certificates
from services.platform.security.guard import guard_of

STORE = "store"
"""Health service that is NOT_SERVING while Redis is unreachable or takes no writes, so that steps wait.

A gateway reports NOT_SERVING as well while it could not lead, because it cannot read the journal.
"""
LEADER = "leader"
"""Health service of a gateway that is SERVING while this process leads."""
LIVENESS = "liveness"
"""Health service that is SERVING from start to stop, whether or not the service can take work."""

WATCHER_GRACE = 0.1
"""Seconds that watchers of health get to receive the last status; they never end by themselves."""

UNCOMPRESSED = 1
"""gRPC's bit set with no compression algorithm, since a few compressed bytes can expand without limit."""

PENDING_SECONDS = 24 * 3600
"""Longest time that a call waits to be accepted; its own deadline ends it earlier."""

REFLECTION = "grpc.reflection.v1.ServerReflection"
"""Name under which newer tools request reflection; its messages are the same as in v1alpha."""

_UNREADY = "it does not serve now"
_INTERNAL = "paceline.internal."
"""Prefix of services that only the platform's own processes call."""
_WILDCARDS = ("0.0.0.0", "::", "[::]")
_running: set[GrpcServer] = set()


class GrpcServer:
    """gRPC server on one port.

    Usage: `add_XServicer_to_server(servicer, grpc_server.server)`, `await start()`, and once it can serve
    `await set_serving(True)`; `await stop(grace)` at the end. Health is NOT_SERVING until `set_serving`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        service: str,
        registry: CollectorRegistry | None = None,
        inner: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`inner` interceptors get admitted calls; their errors are reported like a servicer's."""
        self._config = config
        metrics = rpc_metrics(REGISTRY if registry is None else registry)
        self.guard = guard_of(config)
        budget = ParseBudget(config.max_parsed_bytes, config.max_message_bytes)
        self._interceptor = CallInterceptor(service, self.guard, metrics, config.max_concurrent_calls, budget)
        server = grpc.aio.server(interceptors=[self._interceptor, *inner], options=server_options(config))
        self._services = _NamingServer(server)
        self.server = cast(grpc.aio.Server, self._services)
        self.port = 0
        self._health = health.aio.HealthServicer()
        self._problem = _UNREADY
        self._probes = ProbeServer({"/readyz": self._unready})

    @property
    def address(self) -> str:
        """ "host:port" as peers should dial it; the port is known after `start`."""
        return f"{advertised(self._config)}:{self.port}"

    @property
    def probe_port(self) -> int:
        """Port of probes, once started; 0 if there is none."""
        return self._probes.port

    async def start(self) -> None:
        """Bind and serve.

        ConfigError if the address is not allowed, RuntimeError if it is taken, OSError if the port of probes is.
        """
        if problems := listening_problems(self._config):
            await self._end_unused()
            raise ConfigError(problems)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        public = [name for name in self._services.names if not name.startswith(_INTERNAL)]
        reflected = reflection.aio.ReflectionServicer([*public, reflection.SERVICE_NAME])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, self.server)
        self._services.add_generic_rpc_handlers([_under_its_later_name(reflected)])
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_store(True)
        await self.set_serving(False)
        try:
            self.port = self._bind(f"{bracketed(self._config.host)}:{self._config.port}")
        except RuntimeError:
            await self._end_unused()
            raise
        await self.server.start()
        _running.add(self)
        if self._config.probe_port is not None:
            self._probes.start(self._config.host, self._config.probe_port)

    async def _end_unused(self) -> None:
        """Start and stop a server that never ran, since collecting it otherwise can crash the process."""
        await self.server.start()
        await self.server.stop(0)

    async def set_serving(self, serving: bool, problem: str | None = None) -> None:
        """Set the health of the whole server ("") and of every service on it.

        `/readyz` on the port of probes answers 503 with the `problem`, or 200 if that is empty. By default it
        follows `serving`.
        """
        self._problem = ("" if serving else _UNREADY) if problem is None else problem
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        for name in ("", *self._services.names):
            await self._health.set(name, status)

    async def set_store(self, usable: bool) -> None:
        """Set the health of `STORE`."""
        await self._set_health(STORE, usable)

    async def set_leading(self, leading: bool) -> None:
        """Set the health of `LEADER`, which exists from the first call on."""
        await self._set_health(LEADER, leading)

    async def _set_health(self, name: str, good: bool) -> None:
        response = health_pb2.HealthCheckResponse
        await self._health.set(name, response.SERVING if good else response.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Set health to NOT_SERVING, refuse new calls, and end running ones after `grace` seconds."""
        _running.discard(self)
        self._problem = _UNREADY
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self.server.stop(grace))
        await asyncio.wait([stopping], timeout=WATCHER_GRACE)
        self._interceptor.end_watchers()
        await stopping
        await self._probes.stop()

    async def _unready(self) -> str:
        return self._problem

    def _bind(self, address: str) -> int:
        if self._config.tls is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, server_credentials(self._config.tls))


async def stop_servers(grace: float) -> None:
    """Stop every running server of the process, which could not end otherwise."""
    await asyncio.gather(*(server.stop(grace) for server in list(_running)))


def server_options(config: ServiceConfig) -> Options:
    """Return the options of a server: clients may ping it, and its port belongs to one process only.

    Compressed messages are answered UNIMPLEMENTED before they are received.

    By default gRPC cancels calls that the event loop has not accepted yet: some beyond 1,000, all beyond 3,000, and
    all that have waited for 30 s. Here twice as many may wait as may be served, so that the interceptor answers
    those that are too many.
    """
    max_pending = min(2 * config.max_concurrent_calls, 2**31 - 1)
    options: Options = [
        *common_options(config),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.compression_enabled_algorithms_bitset", UNCOMPRESSED),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.server.max_pending_requests", max_pending),
        ("grpc.server.max_pending_requests_hard_limit", max_pending),
        ("grpc.server_max_unrequested_time_in_server", PENDING_SECONDS),
    ]
    if config.max_connection_age_seconds is not None:
        grace = config.max_connection_age_grace_seconds
        options += [
            ("grpc.max_connection_age_ms", round(config.max_connection_age_seconds * 1000)),
            ("grpc.max_connection_age_grace_ms", round(grace * 1000)),
        ]
    return options


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Return the credentials of a server; each new connection gets the certificate that is then on disk.

    OSError if a file cannot be read, Unreadable if it is invalid, ValueError without a certificate.
    """
    if tls.cert_file is None or tls.key_file is None:
        raise ValueError("tls.cert_file and tls.key_file are needed to serve with TLS")
    watched = watch_certificates(tls)
    shown = watched.current()

    def changed() -> Any:  # None for no change, which grpc's stubs do not allow
        nonlocal shown
        now = watched.current()
        if now is shown:
            return None
        shown = now
        return _shown(now, tls)

    return grpc.dynamic_ssl_server_credentials(_shown(shown, tls), changed, tls.client_auth)


def _shown(certificates: Certificates, tls: TlsConfig) -> grpc.ServerCertificateConfiguration:
    pair: Any = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.roots if tls.client_auth else None)


def _under_its_later_name(reflected: Any) -> grpc.GenericRpcHandler:
    """Return the handlers of `REFLECTION`, which grpcio-reflection lacks."""
    handler = grpc.stream_stream_rpc_method_handler(
        reflected.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": handler})


class _NamingServer:
    """Server that records the names of the services added to it, for health and reflection."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = list(generic_rpc_handlers)
        for handler in handlers:
            if isinstance(handler, grpc.ServiceRpcHandler) and handler.service_name() not in self.names:
                self.names.append(handler.service_name())
        self._server.add_generic_rpc_handlers(handlers)


def advertised(config: ServiceConfig) -> str:
    """Return the host that peers should dial."""
    if config.advertise_host is not None:
        return bracketed(config.advertise_host)
    if config.host in _WILDCARDS:
        return bracketed(socket.gethostbyname(socket.gethostname()))
    return bracketed(config.host)


def bracketed(host: str) -> str:
    """Return a host as written in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
