"""From what an instance's metrics said to what was pre-generated when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from examples.tinymath.background import METRIC, Stretch, read_gauge, stretches


def test_a_reading_holds_until_the_next() -> None:
    readings = [(10.0, 0), (11.0, 4), (12.0, 4), (13.0, 2), (14.0, 0)]
    assert stretches("a", readings, 10.5, 20.0) == [Stretch("a", 0.5, 2.5, 4), Stretch("a", 2.5, 3.5, 2)]


def test_a_window_cuts_what_goes_beyond_it() -> None:
    assert stretches("a", [(0.0, 3)], 5.0, 6.0) == [Stretch("a", 0.0, 1.0, 3)]
    assert stretches("a", [(0.0, 3), (4.0, 0)], 5.0, 6.0) == []
    assert stretches("a", [], 5.0, 6.0) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 30), st.integers(1, 30))
def test_stretches_say_what_the_last_reading_said(counts: list[int], begin: int, length: int) -> None:
    found = stretches("a", [(float(i), n) for i, n in enumerate(counts)], begin, begin + length)
    for second in range(length):
        said = counts[min(begin + second, len(counts) - 1)]
        shown = [s.samples for s in found if s.begin <= second < s.end]
        assert shown == ([said] if said else [])


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def address(registry: CollectorRegistry) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, make_wsgi_app(registry), ThreadingWSGIServer, _Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_gauge_is_read_and_nothing_else(registry: CollectorRegistry, address: str) -> None:
    assert read_gauge(address) == 0, "an instance that does not pre-generate has no such metric"
    Counter("other", "Not asked for.", registry=registry).inc(5)
    Gauge(METRIC, "Samples.", registry=registry).set(7)
    assert read_gauge(address) == 7


def test_an_instance_that_is_gone_pre_generates_nothing() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    assert read_gauge(f"127.0.0.1:{port}") == 0
