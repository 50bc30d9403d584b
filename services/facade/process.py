"""The facade's process: an HTTP server on the event loop of the service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from services.facade.app import app
from services.facade.config import FacadeConfig
from services.platform.config.settings import TlsConfig, listening_problems
from services.platform.config.sources import ConfigError
from services.platform.config.watched import Watched
from services.platform.grpc.server import advertised
from services.platform.security.certificates import server_context
from services.platform.tasks import end

_KEEPALIVE_SECONDS = 75
"""Idle connections are kept longer than clients and proxies usually keep them, so that no request meets a closed
one."""


class FacadeProcess:
    """Content of the process: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(self, config: FacadeConfig, registry: CollectorRegistry) -> None:
        """ConfigError if the facade may not listen there, or cannot be built."""
        if problems := listening_problems(config):
            raise ConfigError(problems)
        self._config = config
        self.application = app(config, registry)
        settings = uvicorn.Config(
            self.application,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEPALIVE_SECONDS,
            limit_concurrency=config.max_connections,
            h11_max_incomplete_event_size=64 * 1024,
            lifespan="on",
        )
        settings.load()
        if config.tls is not None:
            settings.ssl = rotating_context(config.tls)
        self._settings = settings
        self._server = _Server(settings)
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """ "host:port" as clients dial it, once started."""
        return f"{advertised(self._config)}:{self.port}"

    async def start(self) -> None:
        """Open the port and serve. OSError if it is taken."""
        listener = _listener(self._config.host, self._config.port)
        self.port = int(listener.getsockname()[1])
        started = asyncio.create_task(self._server.serve([listener]), name="http")
        self._serving = started
        await self._server.ready.wait()

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._serving is not None, "it was started"
        await asyncio.shield(self._serving)

    async def stop(self, grace: float) -> None:
        """Close the port; requests in progress get `grace` seconds."""
        if self._serving is None:
            return
        self._settings.timeout_graceful_shutdown = grace  # type: ignore[assignment]
        self._server.should_exit = True
        # Idle connections are closed at once; uvicorn looks every 0.1 s.
        await asyncio.wait([self._serving], timeout=grace + 5.0)
        await end([self._serving])


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


def _listener(host: str, port: int) -> socket.socket:
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
