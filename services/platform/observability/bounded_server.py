"""HTTP server of a port that is asked now and then: for metrics, or by probes."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer

MOST_CONNECTIONS = 64
"""Connections to one port at once, each of which has a thread. One more ends the oldest."""
_SILENT_SECONDS = 10.0
"""Longest time that a connection says nothing, in its TLS handshake or after it."""


class BoundedServer(ThreadingWSGIServer):
    """Server whose idle connections neither take all threads and files of the process nor keep others out."""

    # The default is 5. Linux drops connections beyond it, and their clients try again after 1, 3 and 7 s.
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, *args: Any, **options: Any) -> None:
        self._held = dict[socket.socket, socket.socket]()
        """Connections in the order in which they came, each with a handle to end it by: TLS takes its own away."""
        self._lock = threading.Lock()
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a separate thread."""
        request.settimeout(_SILENT_SECONDS)
        with self._lock:
            if len(self._held) >= MOST_CONNECTIONS:
                # Its thread, which may wait for its client, reads the end.
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
        """Log nothing of a client that has left, or whose connection was ended for another."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class QuietHandler(WSGIRequestHandler):
    """Handler that does not log requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(
    host: str, port: int, app: Any, name: str, kind: type[BoundedServer] = BoundedServer
) -> BoundedServer:
    """Serve a WSGI application from a daemon thread of this name. OSError if the port is taken."""
    server = make_server(host, port, app, kind, QuietHandler)
    threading.Thread(target=server.serve_forever, name=name, daemon=True).start()
    return server
