"""Spans from real servers to a real collector, and nothing at all where none is configured."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.contracts.errors import NotFound
from services.platform.config import ConfigError, ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.grpc.server import GrpcServer
from services.platform.observability import otlp, tracing
from services.platform.observability.tracing import NO_SPAN, TRACE_PARENT
from services.platform.service import start_tracing
from tests.support.otlp_collector import Collector, Seen

TRAINER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""The span of a trainer that is traced itself."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last spans are waited for, however slow the collector is."""
    monkeypatch.setattr(otlp, "STOP_SECONDS", 60.0)
    monkeypatch.setattr(otlp, "EXPORT_SECONDS", 60.0)


@pytest.fixture
def traced(collector: Collector, patient: None) -> Iterator[ServiceConfig]:
    """A process that sends its spans to the collector."""
    config = ServiceConfig(tracing_endpoint=collector.address)
    start_tracing("toy", config)
    yield config
    tracing.stop()


class Front(fleet_pb2_grpc.FleetServiceServicer):
    """Asks the one behind it, if there is one."""

    def __init__(self, behind: Any = None) -> None:
        self.behind = behind

    async def ListInstances(self, request: Any, context: Any) -> fleet_pb2.ListInstancesResponse:
        """Do something of its own, then what it is asked for."""
        tracing.begin("thought", about="instances").end(answer=42)
        if self.behind is None:
            raise NotFound("instance", "none")
        await self.behind.ListInstances(request, timeout=60)
        return fleet_pb2.ListInstancesResponse()


@asynccontextmanager
async def serving(config: ServiceConfig, servicer: Front) -> AsyncIterator[Any]:
    """A stub that calls the servicer over a socket."""
    server = GrpcServer(config, service="toy", registry=CollectorRegistry())
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server.server)
    await server.start()
    try:
        async with open_channel(server.address, config) as channel:
            yield fleet_pb2_grpc.FleetServiceStub(channel)
    finally:
        await server.stop(0)


async def call(config: ServiceConfig, **kwargs: Any) -> None:
    """One call that goes through two servers and fails at the second."""
    async with serving(config, Front()) as second, serving(config, Front(second)) as first:
        with pytest.raises(grpc.aio.AioRpcError):
            await first.ListInstances(fleet_pb2.ListInstancesRequest(), timeout=60, **kwargs)


def by_parent(spans: list[Seen]) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {}
    for span in spans:
        found.setdefault(span.parent, []).append(span)
    return found


async def test_a_call_and_what_is_done_for_it_are_one_trace(
    collector: Collector, traced: ServiceConfig
) -> None:
    await call(traced, metadata=((TRACE_PARENT, TRAINER),))
    tracing.stop()
    spans = collector.spans()
    assert {span.trace for span in spans} == {TRAINER.split("-")[1]}
    assert {span.service for span in spans} == {"paceline-toy"}
    under = by_parent(spans)
    (first,) = under[TRAINER.split("-")[2]]
    assert first.name == "paceline.v1.FleetService/ListInstances"
    assert {span.name for span in under[first.id]} == {"thought", first.name}
    thought, second = sorted(under[first.id], key=lambda span: span.begin)
    assert thought.attributes == {"about": "instances", "answer": 42}
    assert second.attributes["rpc.grpc.status_code"] == "NOT_FOUND"
    assert not second.failed, "the caller's mistake"
    assert first.failed, "an error that nobody expected"


async def test_a_call_of_a_trainer_that_is_not_traced_begins_a_trace(
    collector: Collector, traced: ServiceConfig
) -> None:
    await call(traced)
    tracing.stop()
    spans = collector.spans()
    assert len(by_parent(spans)[""]) == 1
    assert len({span.trace for span in spans}) == 1


async def test_a_trace_that_the_trainer_does_not_keep_is_not_kept_here(
    collector: Collector, traced: ServiceConfig
) -> None:
    await call(traced, metadata=((TRACE_PARENT, TRAINER[:-2] + "00"),))
    tracing.stop()
    assert collector.spans() == []


async def test_what_services_do_by_themselves_makes_no_trace(
    collector: Collector, traced: ServiceConfig
) -> None:
    assert tracing.begin("polling") is NO_SPAN
    assert tracing.serve("/paceline.internal.v1.BubbleService/PollWork", "") is NO_SPAN
    tracing.stop()
    assert collector.spans() == []


def test_only_the_first_end_of_a_span_counts(collector: Collector, traced: ServiceConfig) -> None:
    span = tracing.begin("once", root=True)
    span.end("it broke", tokens=1)
    span.end(tokens=2)
    tracing.stop()
    (seen,) = collector.spans()
    assert (seen.attributes, seen.failed) == ({"tokens": 1}, True)


def test_processes_with_the_same_seed_have_spans_of_their_own(traced: ServiceConfig) -> None:
    names = set()
    for _ in range(2):
        random.seed(0)
        names.add(tracing.begin("any", root=True).traceparent)
    assert len(names) == 2


@pytest.mark.usefixtures("patient")
def test_a_share_of_the_traces_can_be_kept(collector: Collector) -> None:
    start_tracing("toy", ServiceConfig(tracing_endpoint=collector.address, tracing_sample_ratio=0.25))
    for _ in range(400):
        root = tracing.begin("root", root=True)
        tracing.begin("child", root.traceparent).end()
        root.end()
    tracing.stop()
    traces: dict[str, int] = {}
    for span in collector.spans():
        traces[span.trace] = traces.get(span.trace, 0) + 1
    assert 50 < len(traces) < 150
    assert set(traces.values()) == {2}, "a trace is kept whole"


def test_a_collector_that_is_away_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "STOP_SECONDS", 0.2)
    start_tracing("toy", ServiceConfig(tracing_endpoint="127.0.0.1:1"))
    tracing.begin("lost", root=True).end()
    tracing.stop()
    assert "last-spans" in [thread.name for thread in threading.enumerate()], "it tries on, and nobody waits"
    assert tracing.begin("after", root=True) is NO_SPAN


def test_without_an_endpoint_nothing_is_imported_and_nothing_is_a_span() -> None:
    code = """
import sys
from services.platform.service import start_tracing
from services.platform.config import ServiceConfig
from services.platform.grpc import channel, interceptor
from services.platform.observability import tracing
from services.platform.observability.tracing import NO_SPAN
start_tracing("toy", ServiceConfig())
assert tracing.begin("nothing", root=True) is NO_SPAN
assert tracing.serve("/paceline.v1.RolloutService/SubmitRollouts", "") is NO_SPAN
assert not tracing.active()
tracing.stop()
# redis-py imports OpenTelemetry's metrics where they are installed.
ours = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry.proto")
ours += ("services.platform.observability.otlp",)
assert not [name for name in sys.modules if name.startswith(ours)]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "services.platform.observability.otlp", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[tracing\]'"):
        start_tracing("toy", ServiceConfig(tracing_endpoint="127.0.0.1:4317"))


@pytest.mark.parametrize("endpoint", ["collector", "collector:", "ftp://collector:1", "a b:1"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="tracing_endpoint"):
        ServiceConfig(tracing_endpoint=endpoint)
