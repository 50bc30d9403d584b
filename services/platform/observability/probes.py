"""Health port: answers `/livez` and `/readyz` in plain HTTP, for kubelets and load balancers, and nothing else.

It is asked without certificate or token, whatever the TLS of the other ports. A thread answers, after the event
loop has turned once: a loop that hangs fails the probe, and one that is slow does not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from services.platform.observability.bounded_server import MOST_CONNECTIONS, BoundedServer, serve

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
