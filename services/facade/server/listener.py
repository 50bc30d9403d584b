"""Listening socket that takes connections only where there is a place for them.

The event loop accepts from it as from any other. A place is held from here on, so that clients that never finish
their TLS handshake are counted as well, and until the socket is closed, whoever closes it.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from typing import Any

import structlog

from services.facade.http_errors import error_body
from services.facade.server.connections import Connections, HttpConnection, State

log = structlog.get_logger(__name__)

_AT_ONCE = 64
"""Connections that are accepted, or refused, in one turn of the event loop; then others have theirs."""
_BACKLOG = 2048
_OWN_FILES = 256
"""Files that this process opens besides: connections to the gateway, logs, pipes."""
_MESSAGE = "the facade has no room for another connection; keep connections alive and reuse them"
_BODY = json.dumps(
    error_body(_MESSAGE, "unavailable_error", param=None, code="TOO_MANY_CONNECTIONS")
).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class PlacedSocket(socket.socket):
    """An accepted socket, which frees its place when it is closed."""

    place: tuple[Connections, HttpConnection] | None = None

    def close(self) -> None:
        """Close it, and free its place."""
        if self.place is not None:
            connections, connection = self.place
            self.place = None
            connections.by_file.pop(self.fileno(), None)
            connections.release(connection)
        super().close()

    def end(self, _state: State) -> None:
        """End the connection; whoever reads from it finds that its client has left."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class PlacingListener(socket.socket):
    """A listening socket whose connections have places."""

    connections: Connections
    answers: bool
    _in_turn = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that has a place; those that have none are answered and closed."""
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
        # More wait: the loop is told that there are none, and comes again.
        self._in_turn = 0
        raise BlockingIOError

    def _refuse(self, refused: socket.socket) -> None:
        with refused, contextlib.suppress(OSError):
            if self.answers:
                refused.setblocking(False)
                # What is left unread would let the answer be lost.
                with contextlib.suppress(BlockingIOError):
                    refused.recv(64 * 1024)
                refused.send(_REFUSAL)


def listen(host: str, port: int, connections: Connections, *, answers: bool) -> PlacingListener:
    """Return a socket that listens; `answers` is whether those refused get an answer, in plain text.

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
    """Return how many of the connections that are wanted this process may have files for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return wanted
    possible = max(files - _OWN_FILES, files // 2, 1)
    if possible < wanted:
        log.warning("connections_limited_by_files", max_connections=wanted, open_files=files, used=possible)
    return min(wanted, possible)
