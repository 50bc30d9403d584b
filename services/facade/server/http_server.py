"""A port that speaks HTTP on the event loop of the process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import uvicorn

from services.facade.server.connections import TICK_SECONDS, ConnectionLimits, Connections
from services.facade.server.listener import listen
from services.facade.server.protocol import MOST_HEADER_BYTES, FacadeProtocol, ServerConfig
from services.platform.config.settings import TlsConfig
from services.platform.config.watched import Watched
from services.platform.security.certificates import server_context
from services.platform.tasks import end

log = structlog.get_logger(__name__)

_TLS_BUFFER = 32 * 1024
"""Bytes that a TLS connection reads at once: two records. asyncio sets aside 256 KiB for each connection, so that
8,192 idle ones would take 2 GiB."""


class HttpServer:
    """One listening port: `start`, then `run` until it is cancelled, then `stop`."""

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
            # Connections have places; of requests whose clients have left there are as many at most.
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
        """Serve until cancelled; an error of what runs here is raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace: float) -> None:
        """Close the port; requests in progress get `grace` seconds."""
        if not self._tasks:
            return
        self._settings.timeout_graceful_shutdown = grace  # type: ignore[assignment]
        self._server.should_exit = True
        # Idle connections are closed at once; uvicorn looks every 0.1 s.
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
    """Server that leaves signals to the process, and says when it listens."""

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
    """Return the TLS context of a server whose connections get the certificates that are on disk then.

    OSError or Unreadable if they cannot be used now.
    """
    paths = [path for path in (tls.key_file, tls.cert_file, tls.ca_file) if path is not None]
    watched = Watched("http_certificate", paths, lambda: server_context(tls))

    def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = watched.current()

    context = server_context(tls)
    # Called in every handshake, with or without a name.
    context.sni_callback = choose
    return context
