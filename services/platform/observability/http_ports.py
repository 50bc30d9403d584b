"""HTTP ports for scrapers and probes, with a bounded number of connections.

The health port answers `/livez` and `/readyz` and nothing else, without certificate or token. A thread answers
after the event loop has turned once: a loop that hangs fails the probe, and a slow one does not.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
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


Check = Callable[[], Coroutine[Any, Any, str]]
"""Function that is run on the event loop and returns what is wrong; empty if nothing is."""

ANSWER_SECONDS = 9.0
"""Longest time that a probe waits for the event loop; kubelet's own timeout of liveness is a little longer."""


class ProbeServer:
    """Port with the answers of `/livez`, which asks only that the event loop turns, and of further checks.

    Status 200 if nothing is wrong, else 503 with the reason as text.
    """

    def __init__(self, checks: Mapping[str, Check], answer_seconds: float = ANSWER_SECONDS) -> None:
        """Take checks by their paths, such as `/readyz`."""
        self._checks: Mapping[str, Check] = {"/livez": _alive, **checks}
        self._seconds = answer_seconds
        # A thread whose connection made way waits on, so that connections do not bound the threads that wait.
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._server: BoundedServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def port(self) -> int:
        """The port; 0 unless started."""
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
        elif problem := self._asked(check):
            status, text = "503 Service Unavailable", problem
        else:
            status, text = "200 OK", "ok"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    def _asked(self, check: Check) -> str:
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
