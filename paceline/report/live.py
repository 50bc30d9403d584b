"""Live report of a run: a web server on this machine whose page updates itself."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Self

from paceline.client import Client
from paceline.errors import PacelineError
from paceline.report.facts import FleetNow, RunFacts, read_facts
from paceline.report.page import render
from paceline.types import Decision

MOST_ENTRIES = 20_000
"""Most entries of the decision log that are kept: the latest ones."""
_RETRY_SECONDS = 1.0
_COMPARED = 64
"""Latest entries among which a repeated one is looked for."""
# The page may use only what is in it, and load itself again.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class LiveReport:
    """Reader of a platform's decision log, from `__enter__` to `__exit__`, with the page of its entries.

    It reads the entries from `since` on, in unix seconds. The platform is asked for its state at most once in
    `refresh` seconds, whatever the number of readers of the page.
    """

    def __init__(self, client: Client, run_id: str, since: float, refresh: float) -> None:
        self._client = client
        self._run_id = run_id
        self._since = since
        self._refresh = refresh
        self._entries: deque[Decision] = deque(maxlen=MOST_ENTRIES)
        self._lock = threading.Lock()
        self._made = ("", float("-inf"))
        self._making = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="decision-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    @property
    def entries(self) -> list[Decision]:
        """All entries so far, in order of arrival."""
        with self._lock:
            return list(self._entries)

    def page(self) -> str:
        """Return the document, made less than `refresh` seconds ago."""
        with self._making:
            text, made_at = self._made
            if time.monotonic() - made_at >= self._refresh:
                text = render(self._facts(), self._refresh)
                self._made = text, time.monotonic()
            return text

    def _facts(self) -> RunFacts:
        facts = read_facts(self.entries, self._run_id)
        try:
            batches = tuple(self._client.batches(self._run_id))
            facts.now = FleetNow(time.time(), tuple(self._client.instances()), batches)
        except PacelineError as error:
            facts.trouble = f"The gateway does not answer: {error}"
        return facts

    def _watch(self) -> None:
        while not self._ending.is_set():
            try:
                for entry in self._client.watch_decisions(self._run_id, self._since):
                    self._take(entry)
            except PacelineError:
                # `_facts` reports the error on the page; the entries so far stay.
                self._ending.wait(_RETRY_SECONDS)
            except ValueError:
                return  # the client was closed

    def _take(self, entry: Decision) -> None:
        with self._lock:
            known = islice(reversed(self._entries), _COMPARED)
            # A stream that is opened again repeats entries of the time at which it was cut.
            if entry not in known:
                self._entries.append(entry)
                self._since = max(self._since, entry.time)


def server(page: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Return a server of one page, for this machine only; `serve_forever` runs it. OSError: the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        """Handler of requests for the page."""

        def do_GET(self) -> None:
            """Answer with the page."""
            if self.headers.get("Host", "").rpartition(":")[0] not in _HOSTS:
                # A page of another site whose name resolves to this machine must not read this one.
                self.send_error(HTTPStatus.FORBIDDEN, "requested by a name that is not this machine's")
            elif self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._answer(page().encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: the terminal is the user's."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
