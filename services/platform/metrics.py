"""Prometheus metrics: the port they are scraped from, and the rate, errors and duration of every RPC."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from services.platform.auth import authenticated
from services.platform.config import ConfigError, ServiceConfig, TlsConfig, listening_problems

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]

RPC_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Bucket borders of RPC durations, in seconds: from a status query to a stream of a whole step."""


class RpcMetrics:
    """Rate, errors and duration of RPCs by service and method ("package.Service/Method")."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "paceline_rpc_requests_total", "RPCs ended.", ["service", "method", "code"], registry=registry
        )
        self.seconds = Histogram(
            "paceline_rpc_seconds",
            "Duration of RPCs.",
            ["service", "method"],
            buckets=RPC_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "paceline_rpc_in_flight", "RPCs running now.", ["service", "method"], registry=registry
        )


_rpc_metrics: WeakKeyDictionary[CollectorRegistry, RpcMetrics] = WeakKeyDictionary()


def rpc_metrics(registry: CollectorRegistry) -> RpcMetrics:
    """The RPC metrics of `registry`, made at the first call: several servers of a process share them."""
    if registry not in _rpc_metrics:
        _rpc_metrics[registry] = RpcMetrics(registry)
    return _rpc_metrics[registry]


def start_metrics_server(config: ServiceConfig, registry: CollectorRegistry = REGISTRY) -> int:
    """Serves `registry` on `config.host`:`config.metrics_port` from a daemon thread; returns the port.

    TLS and token are those of the gRPC port, and so is the rule for listening beyond loopback (ConfigError).
    OSError when the port is taken.
    """
    if problems := listening_problems(config):
        raise ConfigError(problems)
    app: WsgiApp = make_wsgi_app(registry)
    if config.token is not None:
        app = _guarded(app, config.token.get_secret_value())
    server = make_server(config.host, config.metrics_port, app, ThreadingWSGIServer, _QuietHandler)
    if config.tls is not None:
        server.socket = _ssl_context(config.tls).wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)


class _QuietHandler(WSGIRequestHandler):
    """A scrape every few seconds is not worth a log line."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _guarded(app: WsgiApp, token: str) -> WsgiApp:
    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if authenticated(environ.get("HTTP_AUTHORIZATION", ""), token):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"a bearer token is needed\n"]

    return answer


def _ssl_context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    if tls.client_auth:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=str(tls.ca_file))
    return context
