"""The page of a run that goes on, over HTTP."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from paceline import UnavailableError
from paceline import types as t
from paceline.report.live import LiveReport, server
from tests.unit.report.facts_of_a_run import run_entries


class ClientDouble:
    """A client whose stream of decisions is cut once, and whose gateway may be away."""

    def __init__(self, entries: Sequence[t.Decision]) -> None:
        self._entries = entries
        self.away = False
        self.asked = 0
        self.opened: list[float] = []
        self.done = threading.Event()

    def watch_decisions(self, run_id: str, since: float) -> Iterator[t.Decision]:
        self.opened.append(since)
        half = len(self._entries) // 2
        if len(self.opened) == 1:
            yield from self._entries[:half]
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "the gateway is gone")
        yield from (entry for entry in self._entries if entry.time >= since)
        self.done.set()
        raise ValueError("the client was closed")

    def instances(self) -> tuple[t.Instance, ...]:
        self.asked += 1
        if self.away:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "nobody there")
        return ()

    def batches(self, run_id: str) -> Iterator[t.BatchStatus]:
        yield from ()


def test_it_reads_every_entry_once_also_when_its_stream_is_cut_and_says_when_nobody_answers() -> None:
    entries = sorted(run_entries(), key=lambda each: each.time)
    client: Any = ClientDouble(entries)
    with LiveReport(client, "run", 5.0, refresh=60.0) as report:
        assert client.done.wait(60)
        assert report.entries == entries
        assert client.opened[0] == 5.0
        client.away = True
        text = report.page()
        assert "The gateway does not answer" in text
        assert "Steps 0 to 2" in text
        # Whoever asks again within `refresh` gets the same.
        assert report.page() is text
        assert client.asked == 1


@pytest.fixture
def address() -> Iterator[str]:
    served = server(lambda: "<p>here</p>", 0)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


def test_it_serves_one_page_that_may_fetch_nothing_but_itself(address: str) -> None:
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert answer.read() == b"<p>here</p>"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert answer.headers["Cache-Control"] == "no-store"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/other", timeout=60)


def test_a_page_of_another_site_cannot_read_it_under_a_name_of_its_own(address: str) -> None:
    request = urllib.request.Request(address, headers={"Host": "evil.example:80"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=60)
