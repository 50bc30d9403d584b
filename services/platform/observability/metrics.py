"""Prometheus metrics of every service: the port they are scraped from, and rate, errors and duration of RPCs."""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    disable_created_metrics,
    make_wsgi_app,
)

from services.contracts.errors import PermissionDenied, ResourceExhausted
from services.platform.config import ConfigError, ServiceConfig, TlsConfig, listening_problems
from services.platform.memory import own_memory_share
from services.platform.observability.http_ports import BoundedServer, serve
from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram
from services.platform.security.caller import current_caller
from services.platform.security.certificates import Watched, server_context
from services.platform.security.guard import Guard, guard_of

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]

RPC_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Bucket borders of RPC durations, in seconds: from a status query to a stream of a whole step."""


class RpcMetrics(MetricSet, prefix="paceline_rpc_"):
    """Rate, errors and duration of RPCs by component and method ("package.Service/Method").

    The label is not `service`, which Kubernetes uses for the target of a scrape.
    """

    requests = counter("requests_total", "RPCs ended.", "component", "method", "code")
    seconds = histogram("seconds", "Duration of RPCs.", RPC_SECONDS, "component", "method")
    in_flight = gauge("in_flight", "RPCs running now.", "component", "method")
    refused = counter(
        "refused_total",
        "RPCs refused of a token, by its name and what it lacks: MISSING_SCOPE, RUN_NOT_GRANTED, or what was used "
        "up, such as requests, max_queued_samples and max_queued_tokens.",
        "component",
        "grant",
        "reason",
    )

    def count_refusal(self, component: str, error: Exception) -> None:
        """Count an error if it refuses what the current caller may not have, or not now."""
        caller = current_caller()
        if caller is not None and isinstance(error, PermissionDenied | ResourceExhausted):
            self.refused.labels(component, caller.name, error.reason).inc()


_rpc_metrics: WeakKeyDictionary[CollectorRegistry, RpcMetrics] = WeakKeyDictionary()


def rpc_metrics(registry: CollectorRegistry) -> RpcMetrics:
    """Return the RPC metrics of a registry, which all servers of a process share."""
    if registry not in _rpc_metrics:
        _rpc_metrics[registry] = RpcMetrics(registry)
    return _rpc_metrics[registry]


@functools.cache
def redis_up() -> Gauge:
    """Return the gauge of Redis's use to this process; heartbeats and leases set it."""
    text = "1 when Redis accepted a write last time, 0 when it could not be reached or accepts none now."
    return Gauge("paceline_redis_up", text)


@functools.cache
def redis_errors() -> Counter:
    """Return the counter of heartbeats and leases that Redis did not take, by reason."""
    text = (
        "Heartbeats and renewals of leases that Redis did not take: unreachable, loading, full, read_only, "
        "snapshot_failed, no_replicas, primary_down, cluster_down, resharding, script_runs."
    )
    return Counter("paceline_redis_errors_total", text, ["reason"])


def show_build(component: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Publish the component and version of this process, and how much of its memory is in use."""
    info = Info("paceline_build", "The component and its version.", registry=registry)
    info.info({"component": component, "version": metadata.version("paceline")})
    memory = Gauge(
        "paceline_memory_ratio",
        "Memory in use by this process's control group, a container's, over its limit; 0: there is no limit.",
        registry=registry,
    )
    memory.set_function(own_memory_share)


def start_metrics_server(config: ServiceConfig, registry: CollectorRegistry = REGISTRY) -> int:
    """Serve `registry` on `config.host`:`config.metrics_port` from a daemon thread; return the port.

    TLS and token are those of the gRPC port, and so is the rule for listening beyond loopback (ConfigError).
    OSError when the port is taken.
    """
    if problems := listening_problems(config):
        raise ConfigError(problems)
    # Creation times would add a third to the series, and no rule or board uses them.
    disable_created_metrics()
    app: WsgiApp = make_wsgi_app(registry)
    guard = guard_of(config)
    if guard is not None:
        app = _guarded(app, guard)
    kind = BoundedServer if config.tls is None else tls_server(config.tls)
    return int(serve(config.host, config.metrics_port, app, "metrics", kind).server_port)


def _guarded(app: WsgiApp, guard: Guard) -> WsgiApp:
    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        allowed = guard.may_scrape(environ.get("HTTP_AUTHORIZATION", ""))
        if allowed:
            return app(environ, start_response)
        plain = ("Content-Type", "text/plain")
        if allowed is None:
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), plain])
            return [b"a bearer token is needed\n"]
        start_response("403 Forbidden", [plain])
        return [b"this token does not have the scope metrics\n"]

    return answer


def tls_server(tls: TlsConfig) -> type[BoundedServer]:
    """Return the server class for `serve`. Raises as `certificates.read_certificates`."""
    paths = [path for path in (tls.key_file, tls.cert_file, tls.ca_file) if path is not None]
    context = Watched("metrics_certificate", paths, lambda: server_context(tls))

    class Server(_TlsServer):
        contexts = context

    return Server


class _TlsServer(BoundedServer):
    contexts: Watched[ssl.SSLContext]

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake in the thread of the connection, so that a slow client does not block others."""
        try:
            secured = self.contexts.current().wrap_socket(request, server_side=True)
        except OSError:
            return  # not a TLS client, or it has left
        with secured:
            super().finish_request(secured, client_address)
            with suppress(OSError):
                secured.shutdown(socket.SHUT_WR)
