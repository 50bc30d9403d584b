"""Port of one rank: sends KV to the same rank of another instance, and receives it, in threads.

The port is in the worker that holds the KV; `KvWorkerMixin` adds it to vLLM's worker. It is called between two
steps of the engine, and works while steps run. It decides nothing about a sample.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import structlog

from services.generation.kv_transfer.block_store import Geometry, KvStore
from services.generation.kv_transfer.links import (
    STALL_SECONDS,
    BadFrame,
    KvLink,
    NixlLink,
    TcpLink,
    dial,
    make_agent,
)
from services.generation.kv_transfer.reason import NotMoved
from services.generation.kv_transfer.transfers import KvReceiver, KvSender
from services.platform.config import TlsConfig
from services.platform.security.certificates import Unreadable, server_context

_log = structlog.get_logger(__name__)
CONNECTIONS = 64
"""Default limit of simultaneous connections."""
# Longest wait for the thread of a closed connection to end, on an overloaded machine.
_LEAVE_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_LOG_SECONDS = 10.0


class Listener:
    """Listener that serves each connection in a thread, with a limited number of connections.

    Anyone who can reach the port can connect. A connection that has not sent HELLO with a valid token is a
    stranger: it has a few seconds for that, TLS included, and when all places are taken the oldest stranger is
    closed. So idle connections use no more than the limit, and block no move.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: TlsConfig | None,
        serve: Callable[[TcpLink], None],
        *,
        limit: int = CONNECTIONS,
        patience: float = STALL_SECONDS,
    ) -> None:
        """Listen, and serve connections from now on.

        Args:
            host: address to listen on.
            port: port to listen on; 0 for any free one.
            tls: certificates; None for plain text.
            serve: called with each link in a separate thread; must call `identified` on it. The link is closed when
                it returns.
            limit: most simultaneous connections.
            patience: seconds within which a connection must identify itself.

        Raises:
            OSError: the port is taken.
        """
        self._tls = tls
        self._serve = serve
        self._limit = limit
        self._patience = patience
        self._over = threading.Event()
        self._places = threading.Condition()
        self._taken = 0
        # Connections that have not identified themselves, by number, the oldest first.
        self._strangers: dict[int, socket.socket] = {}
        self._turned_away, self._logged_at = 0, float("-inf")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host.strip("[]"), port), family=family)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Open ones continue."""
        self._over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        number = 0
        while not self._over.is_set():
            try:
                connection, _ = self._socket.accept()
                number += 1
                if not self._enter(number, connection):
                    connection.close()
                    continue
                answering = threading.Thread(
                    target=self._answer, args=(number, connection), name="kv-link", daemon=True
                )
                try:
                    answering.start()
                except BaseException:
                    connection.close()
                    self._leave(number)
                    raise
            except (OSError, RuntimeError) as error:
                # Also raised when files or threads run out; the next attempt may find some.
                if not self._over.wait(_RETRY_SECONDS):
                    _log.warning("kv_accept_failed", error=repr(error))

    def _enter(self, number: int, connection: socket.socket) -> bool:
        """Take a place for a connection, closing the oldest stranger if necessary; return False if none is free."""
        with self._places:
            if self._taken >= self._limit and self._turn_away():
                self._places.wait_for(lambda: self._taken < self._limit, _LEAVE_SECONDS)
            if self._taken >= self._limit:
                return False
            self._taken += 1
            self._strangers[number] = connection
            return True

    def _turn_away(self) -> bool:
        """Close the connection of the oldest stranger; return False if there is none. Logs at intervals."""
        found = bool(self._strangers)
        if found:
            oldest = self._strangers.pop(next(iter(self._strangers)))
            with suppress(OSError):
                # The plain socket's method, because another thread uses the SSLSocket; it wakes that thread.
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        self._turned_away += 1
        if time.monotonic() - self._logged_at >= _LOG_SECONDS:
            _log.warning(
                "kv_connections_turned_away",
                port=self.port,
                count=self._turned_away,
                reason=f"migration_connections allows {self._limit} at once",
            )
            self._turned_away, self._logged_at = 0, time.monotonic()
        return found

    def _leave(self, number: int) -> None:
        with self._places:
            self._strangers.pop(number, None)
            self._taken -= 1
            self._places.notify()

    def _identified(self, number: int) -> None:
        with self._places:
            self._strangers.pop(number, None)

    def _answer(self, number: int, connection: socket.socket) -> None:
        deadline = time.monotonic() + self._patience
        try:
            # Limits the whole handshake.
            connection.settimeout(self._patience)
            if self._tls is not None:
                # Certificates are read for each connection, because they may be replaced while the service runs.
                context = server_context(self._tls)
                connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                with self._places:
                    if number not in self._strangers:
                        raise ConnectionError("turned away")
                    self._strangers[number] = connection
                connection.do_handshake()
            link = TcpLink(connection, deadline, lambda: self._identified(number))
            self._serve(link)
            link.close()
        except (OSError, BadFrame, Unreadable) as error:
            # Anyone can connect; failures of known migrations are logged with their outcome.
            _log.debug("kv_connection_ended", error=repr(error))
        finally:
            connection.close()
            self._leave(number)


class KvPort:
    """Sender and receiver of one rank, and the listener for its peers."""

    def __init__(
        self, store: KvStore, rank: int, *, chunk_bytes: int, senders: int, agent: Any = None
    ) -> None:
        """Create a port that does not listen yet.

        Args:
            store: KV of this rank.
            rank: rank of this worker.
            chunk_bytes: approximate bytes of KV per frame.
            senders: samples that are sent at once.
            agent: NIXL agent that transfers KV; None for TCP.
        """
        chunk_blocks = max(1, chunk_bytes // store.geometry.block_bytes)
        self._rank = rank
        self._sender = sender = KvSender(store, rank, chunk_blocks, senders, self._dial)
        self._receiver = receiver = KvReceiver(store, rank, chunk_blocks)
        self.send, self.end = sender.send, sender.end
        self.expect, self.received = receiver.expect, receiver.received
        self.failures, self.drop = receiver.failures, receiver.drop
        self._agent = agent
        self._tls: TlsConfig | None = None
        self._listener: Listener | None = None

    def on_drafters(self, callback: Callable[[str, bytes], None]) -> None:
        """Call back in the connection's thread with migration id and drafter state, as soon as they arrive."""
        self._receiver.on_drafters = callback

    def listen(self, host: str, port: int, tls: TlsConfig | None, connections: int = CONNECTIONS) -> int:
        """Accept up to `connections` simultaneous connections; returns the port. OSError if it is taken."""
        self._tls = tls
        own = port + self._rank if port else 0
        self._listener = Listener(host, own, tls, self._serve, limit=connections)
        return self._listener.port

    def close(self) -> None:
        """Stop listening, and end all transfers."""
        if self._listener is not None:
            self._listener.close()
        self._sender.close()
        self._receiver.close()

    def _dial(self, address: str, deadline: float) -> KvLink:
        return self._kv_link(dial(address, self._tls, deadline))

    def _serve(self, connection: TcpLink) -> None:
        link = self._kv_link(connection)
        try:
            self._receiver.serve(link)
        finally:
            link.close()

    def _kv_link(self, link: TcpLink) -> KvLink:
        """Return the link for KV over a connection: the connection itself, or NIXL's."""
        return link if self._agent is None else NixlLink(link, self._agent)


class KvWorkerMixin:
    """Mixin for vLLM's worker. The annotations name the attributes of the worker that it uses."""

    model_runner: Any
    rank: int
    _kv_port: KvPort
    _kv_sent: dict[str, Future[Any]]

    def open_kv_port(
        self, blocks: int, block_size: int, chunk_bytes: int, senders: int, agent: str
    ) -> Geometry:
        """Create the port of this rank (see `KvPort`); returns the geometry of its KV."""
        store = KvStore(self.model_runner.kv_caches, blocks, block_size)
        nixl = make_agent(f"{agent}/{self.rank}") if agent else None
        self._kv_port = KvPort(store, self.rank, chunk_bytes=chunk_bytes, senders=senders, agent=nixl)
        self._kv_sent = {}
        return store.geometry

    def own_kv_port(self) -> KvPort:
        """Return the port itself, for an engine in this process."""
        return self._kv_port

    def call_kv_port(self, method: str, *args: Any) -> Any:
        """Call a method of the port from another process. NotMoved is returned, not raised.

        `send` returns nothing here; `sent` returns its result, or None before it has one.
        """
        try:
            if method == "send":
                self._kv_sent[args[0]] = self._kv_port.send(*args)
                return None
            if method == "sent":
                future = self._kv_sent[args[0]]
                return future.result() if future.done() else None
            if method == "end":
                self._kv_sent.pop(args[0], None)
            return getattr(self._kv_port, method)(*args)
        except NotMoved as error:
            return error
