"""HTTP ports for scrapers and probes, with a bounded number of connections.

`start_metrics_server` serves metrics with the TLS and tokens of the gRPC port. `ProbeServer` answers `/livez` and
`/readyz` and nothing else, without certificate or token.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from services.platform.config import ConfigError, ServiceConfig, TlsConfig, listening_problems
from services.platform.security.certificates import Watched, server_context
from services.platform.security.guard import Guard, guard_of

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]
Check = Callable[[], Coroutine[Any, Any, str]]
"""Function that runs on the event loop and returns what is wrong; empty if nothing is."""

MAX_CONNECTIONS = 64
"""Connections to one port at once, each with its own thread. One more closes the oldest."""
ANSWER_SECONDS = 9.0
"""Longest time that a probe waits for the event loop; kubelet's own timeout of liveness is a little longer."""
_SILENT_SECONDS = 10.0
"""Longest time without data from a connection, in its TLS handshake or after it."""


def start_metrics_server(config: ServiceConfig, registry: CollectorRegistry = REGISTRY) -> int:
    """Serve `registry` on `config.host`:`config.metrics_port` from a daemon thread; return the port.

    TLS, token and the rule for listening beyond loopback (ConfigError) are the same as on the gRPC port. OSError if
    the port is taken.
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


class ProbeServer:
    """Port that answers `/livez`, for which the event loop only has to turn, and further checks.

    Status 200 if nothing is wrong, else 503 with the reason as text. A thread answers once the event loop has
    turned: a loop that hangs fails the probe, and a slow one does not.
    """

    def __init__(self, checks: Mapping[str, Check], answer_seconds: float = ANSWER_SECONDS) -> None:
        """Take further checks by their paths, such as `/readyz`."""
        self._checks: Mapping[str, Check] = {"/livez": _alive, **checks}
        self._seconds = answer_seconds
        # A thread keeps waiting after its connection was closed for another, so connections do not bound threads.
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._server: BoundedServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def port(self) -> int:
        """Port number; 0 unless started."""
        return 0 if self._server is None else int(self._server.server_port)

    def start(self, host: str, port: int) -> None:
        """Serve from a daemon thread; call it on the event loop that is watched. OSError if the port is taken."""
        self._loop = asyncio.get_running_loop()
        self._server = serve(host, port, self._answer, "probes")

    async def stop(self) -> None:
        """Close the port."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        check = self._checks.get(environ["PATH_INFO"]) if environ["REQUEST_METHOD"] == "GET" else None
        if check is None:
            status, text = "404 Not Found", "not found"
        elif problem := self._result(check):
            status, text = "503 Service Unavailable", problem
        else:
            status, text = "200 OK", "ok"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    def _result(self, check: Check) -> str:
        assert self._loop is not None, "it was started"
        if not self._places.acquire(blocking=False):
            return "too many probes wait for the event loop"
        try:
            answer = asyncio.run_coroutine_threadsafe(check(), self._loop)
            try:
                return answer.result(self._seconds)
            except TimeoutError:
                answer.cancel()
                return f"the event loop has not answered within {self._seconds:g} s"
        finally:
            self._places.release()


async def _alive() -> str:
    return ""


class BoundedServer(ThreadingWSGIServer):
    """HTTP server whose idle connections neither exhaust threads and files of the process nor keep others out."""

    # The default is 5. Linux drops connections beyond it, and their clients try again after 1, 3 and 7 s.
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, *args: Any, **options: Any) -> None:
        self._held = dict[socket.socket, socket.socket]()
        """Connections, oldest first, each with a duplicate to close it by, since TLS detaches the original."""
        self._lock = threading.Lock()
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a separate thread."""
        request.settimeout(_SILENT_SECONDS)
        with self._lock:
            if len(self._held) >= MAX_CONNECTIONS:
                # Its thread, which may be waiting for its client, then reads the end of the stream.
                with self._held.pop(next(iter(self._held))) as oldest, suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._held[request] = request.dup()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was served."""
        with self._lock:
            if (handle := self._held.pop(request, None)) is not None:
                handle.close()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no errors of clients that have left, or whose connection was closed for another."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class QuietHandler(WSGIRequestHandler):
    """Handler that does not log requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(
    host: str, port: int, app: Any, name: str, kind: Callable[..., BoundedServer] = BoundedServer
) -> BoundedServer:
    """Serve a WSGI application from a daemon thread of this name. OSError if the port is taken."""
    server = kind((host, port), QuietHandler)
    server.set_app(app)
    threading.Thread(target=server.serve_forever, name=name, daemon=True).start()
    return server


def tls_server(tls: TlsConfig) -> Callable[..., BoundedServer]:
    """Return the `kind` of server for `serve`. Raises as `certificates.read_certificates`."""
    paths = [path for path in (tls.key_file, tls.cert_file, tls.ca_file) if path is not None]
    return partial(_TlsServer, Watched("metrics_certificate", paths, lambda: server_context(tls)))


class _TlsServer(BoundedServer):
    def __init__(self, contexts: Watched[ssl.SSLContext], *args: Any) -> None:
        self._contexts = contexts
        super().__init__(*args)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake in the thread of the connection, so that a slow client does not block others."""
        try:
            secured = self._contexts.current().wrap_socket(request, server_side=True)
        except OSError:
            return  # not a TLS client, or it has left
        with secured:
            super().finish_request(secured, client_address)
            with suppress(OSError):
                secured.shutdown(socket.SHUT_WR)
