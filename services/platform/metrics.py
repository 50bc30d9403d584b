"""Prometheus metrics: the port they are scraped from, and the rate, errors and duration of every RPC."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.exposition import ThreadingWSGIServer

from services.platform.config import ConfigError, ServiceConfig, listening_problems
from services.platform.guard import Guard, guard_of
from services.platform.scraping import tls_server

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]

RPC_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Bucket borders of RPC durations, in seconds: from a status query to a stream of a whole step."""


class RpcMetrics:
    """Rate, errors and duration of RPCs by component and method ("package.Service/Method").

    Not `service`: that is Kubernetes's own name for what was scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "paceline_rpc_requests_total", "RPCs ended.", ["component", "method", "code"], registry=registry
        )
        self.seconds = Histogram(
            "paceline_rpc_seconds",
            "Duration of RPCs.",
            ["component", "method"],
            buckets=RPC_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "paceline_rpc_in_flight", "RPCs running now.", ["component", "method"], registry=registry
        )


_rpc_metrics: WeakKeyDictionary[CollectorRegistry, RpcMetrics] = WeakKeyDictionary()


def rpc_metrics(registry: CollectorRegistry) -> RpcMetrics:
    """The RPC metrics of `registry`, made at the first call: several servers of a process share them."""
    if registry not in _rpc_metrics:
        _rpc_metrics[registry] = RpcMetrics(registry)
    return _rpc_metrics[registry]


@functools.cache
def redis_up() -> Gauge:
    """Whether Redis can be reached from this process; set by heartbeats and leases."""
    return Gauge("paceline_redis_up", "1 when Redis answered last time, 0 when it could not be reached.")


def show_build(component: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Says which component this process is, and of which version."""
    info = Info("paceline_build", "The component and its version.", registry=registry)
    info.info({"component": component, "version": metadata.version("paceline")})


def start_metrics_server(config: ServiceConfig, registry: CollectorRegistry = REGISTRY) -> int:
    """Serves `registry` on `config.host`:`config.metrics_port` from a daemon thread; returns the port.

    TLS and token are those of the gRPC port, and so is the rule for listening beyond loopback (ConfigError).
    OSError when the port is taken.
    """
    if problems := listening_problems(config):
        raise ConfigError(problems)
    # When each series began: a third more of them, and nothing of Prometheus's own reads it.
    disable_created_metrics()
    app: WsgiApp = make_wsgi_app(registry)
    guard = guard_of(config)
    if guard is not None:
        app = _guarded(app, guard)
    kind = ThreadingWSGIServer if config.tls is None else tls_server(config.tls)
    server = make_server(config.host, config.metrics_port, app, kind, _QuietHandler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)


class _QuietHandler(WSGIRequestHandler):
    """A scrape every few seconds is not worth a log line."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


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
