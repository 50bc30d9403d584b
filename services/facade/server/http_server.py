"""Serve HTTP/1.1 on one port of the event loop, with a bounded number of connections.

A listening socket accepts a connection only if there is a place for it, and holds the place until the socket is
closed, so clients that never finish a TLS handshake count, too. The protocol is uvicorn's over h11, which bounds
the bytes of a header; httptools does not. Certificates are reloaded when their files change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import sys
from asyncio import sslproto
from collections.abc import Callable, Iterator
from typing import Any

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.facade.http_errors import error_body
from services.facade.server.connections import (
    TICK_SECONDS,
    ConnectionLimits,
    Connections,
    HttpConnection,
    State,
)
from services.platform.config import TlsConfig
from services.platform.security.certificates import Watched, server_context
from services.platform.tasks import end

log = structlog.get_logger(__name__)

_AT_ONCE = 64
"""Most connections that are accepted or refused in one turn of the event loop."""
_BACKLOG = 2048
_OWN_FILES = 256
"""Files that this process opens in addition: connections to the gateway, logs, pipes."""
MOST_HEADER_BYTES = 64 * 1024
"""Most bytes of a request's line and header."""
_TOO_LONG = 431
_TLS_BUFFER = 32 * 1024
"""Bytes that a TLS connection reads at once: two records. By default asyncio reserves 256 KiB for each
connection, or 2 GiB for 8,192 idle ones."""
_MESSAGE = "the facade has no room for another connection; keep connections alive and reuse them"
_BODY = json.dumps(
    error_body(_MESSAGE, "unavailable_error", param=None, code="TOO_MANY_CONNECTIONS")
).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class PlacedSocket(socket.socket):
    """Accepted socket, which frees its place when it is closed."""

    place: tuple[Connections, HttpConnection] | None = None

    def close(self) -> None:
        """Close the socket, and free its place."""
        if self.place is not None:
            connections, connection = self.place
            self.place = None
            connections.by_file.pop(self.fileno(), None)
            connections.release(connection)
        super().close()

    def end(self, _state: State) -> None:
        """End the connection; its reader finds that the client has left."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class PlacingListener(socket.socket):
    """Listening socket whose connections have places."""

    connections: Connections
    answers: bool
    _in_turn = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that gets a place; others are answered and closed."""
        while self._in_turn < _AT_ONCE:
            accepted, peer = super().accept()
            self._in_turn += 1
            placed = PlacedSocket(accepted.family, accepted.type, accepted.proto, accepted.detach())
            found = self.connections.admit(peer[0], placed.end)
            if found is not None:
                placed.place = self.connections, found
                self.connections.by_file[placed.fileno()] = found
                return placed, peer
            self._refuse(placed)
        # More may wait: end this turn as if there were none, and the loop returns.
        self._in_turn = 0
        raise BlockingIOError

    def _refuse(self, refused: socket.socket) -> None:
        with refused, contextlib.suppress(OSError):
            if self.answers:
                refused.setblocking(False)
                # Closing with unread data would reset the connection and lose the answer.
                with contextlib.suppress(BlockingIOError):
                    refused.recv(64 * 1024)
                refused.send(_REFUSAL)


def listen(host: str, port: int, connections: Connections, *, answers: bool) -> PlacingListener:
    """Return a listening socket; if `answers`, refused connections get an answer in plain text.

    OSError if the port is taken.
    """
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = PlacingListener(family, socket.SOCK_STREAM)
    listener.connections, listener.answers = connections, answers
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def most_connections(wanted: int) -> int:
    """Return the number of connections, at most `wanted`, for which this process may open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    possible = max(files - _OWN_FILES, files // 2, 1)
    if possible < wanted:
        log.warning("connections_limited_by_files", max_connections=wanted, open_files=files, used=possible)
    return min(wanted, possible)


class ServerConfig(uvicorn.Config):
    """Settings of a uvicorn server, and its connections."""

    connections: Connections


class FacadeProtocol(H11Protocol):
    """Protocol of one connection, which reports its state to `Connections`."""

    config: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._connections = self.config.connections
        self._place = self._connections.by_file[transport.get_extra_info("socket").fileno()]
        self._place.end = self._end
        self._partial = False

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        self._connections.count(self._place, len(data))
        if not self._in_work() and len(data) > MOST_HEADER_BYTES:
            # h11 bounds only an unfinished header. A whole one may arrive at once.
            super().data_received(data[: MOST_HEADER_BYTES + 1])
            data = data[MOST_HEADER_BYTES + 1 :]
        if not self.transport.is_closing():
            super().data_received(data)
        self._partial = not self._in_work()
        self._settle()

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        super().on_response_complete()
        # True if the rest of a refused body is still to come, or the next header has begun.
        self._partial = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        self._settle()

    def pause_writing(self) -> None:
        """Pause the writer of the answer."""
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        """Resume the writer of the answer."""
        super().resume_writing()
        self._settle()

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: the connection has a deadline in every state."""

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request, and close."""
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == _TOO_LONG:
            self._refuse(_TOO_LONG, f"the header is longer than {MOST_HEADER_BYTES} bytes", "HEADER_TOO_LONG")
        else:
            self._refuse(400, f"this is no HTTP/1.1 request: {error or msg}", "INVALID_HTTP")

    def _in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _settle(self) -> None:
        self._connections.enter(self._place, self._state())

    def _state(self) -> State:
        if self.flow.write_paused:
            return State.SENDING
        if self.transport.is_closing():
            return State.ENDING
        if self._in_work():
            return State.RECEIVING if self.cycle.more_body else State.WORKING
        if self._partial or self.cycle is None:
            return State.WAITING
        return State.RESTING

    def _end(self, state: State) -> None:
        """Close the connection after the deadline of its state."""
        if state is State.WAITING and self._partial and self.conn.our_state is h11.IDLE:
            self._refuse(408, "the header did not come in time", "HEADER_TOO_SLOW")
        elif state is State.RECEIVING and self.conn.our_state is h11.SEND_RESPONSE:
            self._refuse(408, "the body did not come in time", "BODY_TOO_SLOW")
        elif state is State.RESTING:
            self.transport.close()
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = json.dumps(error_body(message, "invalid_request_error", param=None, code=code)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.cycle is not None:
            # The handler that reads the body may send nothing more.
            self.cycle.disconnected = True
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer:
    """HTTP server on one port: `start` it, then `run` until cancelled, then `stop`."""

    def __init__(
        self,
        application: Callable[..., Any],
        limits: ConnectionLimits,
        tls: TlsConfig | None,
        *,
        ended: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """OSError or Unreadable if the certificates cannot be used."""
        self.connections = Connections(limits, ended)
        settings = ServerConfig(
            application,
            http=FacadeProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # Connections are bounded by places, and requests whose clients have left by as many again.
            limit_concurrency=2 * limits.total,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            lifespan="on",
        )
        settings.connections = self.connections
        settings.load()
        if tls is not None:
            settings.ssl = rotating_context(tls)
            sslproto.SSLProtocol.max_size = _TLS_BUFFER  # type: ignore[attr-defined]
        self._settings = settings
        self._server = _Server(settings)
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Open the port and serve. OSError if it is taken."""
        listener = listen(host, port, self.connections, answers=not self._settings.is_ssl)
        self.port = int(listener.getsockname()[1])
        self._tasks = [
            asyncio.create_task(self._server.serve([listener]), name="http"),
            asyncio.create_task(self._tick(), name="deadlines"),
        ]
        await self._server.ready.wait()

    async def run(self) -> None:
        """Serve until cancelled; errors of the server's tasks are raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace: float) -> None:
        """Close the port; requests in progress get `grace` seconds."""
        if not self._tasks:
            return
        self._settings.timeout_graceful_shutdown = grace  # type: ignore[assignment]
        self._server.should_exit = True
        # Idle connections are closed at once; uvicorn checks every 0.1 s.
        await asyncio.wait(self._tasks[:1], timeout=grace + 5.0)
        await end(self._tasks)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.connections.tick()
            except Exception:
                log.exception("deadlines_failed")


class _Server(uvicorn.Server):
    """uvicorn server that leaves signals to the process, and sets `ready` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def rotating_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return the TLS context of a server. Each connection gets the current certificates on disk.

    OSError or Unreadable if the present ones cannot be used.
    """
    paths = [path for path in (tls.key_file, tls.cert_file, tls.ca_file) if path is not None]
    watched = Watched("http_certificate", paths, lambda: server_context(tls))

    def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = watched.current()

    context = server_context(tls)
    # Called in every handshake, with or without a name.
    context.sni_callback = choose
    return context
