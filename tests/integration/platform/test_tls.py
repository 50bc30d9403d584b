"""TLS and mutual TLS over a real socket, for gRPC and for metrics."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.config import ServiceConfig, TlsConfig
from services.platform.grpc.channel import open_channel
from services.platform.grpc.server import GrpcServer
from services.platform.observability.http_ports import MAX_CONNECTIONS, start_metrics_server
from services.platform.security.certificates import Unreadable
from tests.support.certificates import DAY
from tests.support.waiting import until

REQUEST = fleet_pb2.ListInstancesRequest()


async def code_of(address: str, config: ServiceConfig) -> grpc.StatusCode:
    async with open_channel(address, config) as channel:
        try:
            await fleet_pb2_grpc.FleetServiceStub(channel).ListInstances(REQUEST, timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_peer_that_trusts_the_authority_is_answered(serve: Any, authority: Any) -> None:
    tls = authority("ours").tls("server")
    only_trust = TlsConfig(ca_file=tls.ca_file)
    config = ServiceConfig(tls=tls, token="t")
    async with serve(config, ServiceConfig(tls=only_trust, token="t")) as toy:
        assert (await toy.stub.ListInstances(REQUEST, timeout=60)).instances
        wrong_token = ServiceConfig(tls=only_trust, token="other")
        assert await code_of(toy.server.address, wrong_token) == grpc.StatusCode.UNAUTHENTICATED


async def test_plain_text_and_foreign_authorities_are_not_let_through(serve: Any, authority: Any) -> None:
    async with serve(ServiceConfig(tls=authority("ours").tls("server"), token="t")) as toy:
        assert await code_of(toy.server.address, ServiceConfig(token="t")) != grpc.StatusCode.OK
        foreign = ServiceConfig(tls=TlsConfig(ca_file=authority("theirs").tls("x").ca_file), token="t")
        assert await code_of(toy.server.address, foreign) != grpc.StatusCode.OK


async def test_mutual_tls_asks_clients_for_a_certificate(serve: Any, authority: Any) -> None:
    ours, theirs = authority("ours"), authority("theirs")
    server = ours.tls("server", client_auth=True)
    async with serve(
        ServiceConfig(tls=server, token="t"), ServiceConfig(tls=ours.tls("peer"), token="t")
    ) as toy:
        assert (await toy.stub.ListInstances(REQUEST, timeout=60)).instances
        without = ServiceConfig(tls=TlsConfig(ca_file=server.ca_file), token="t")
        assert await code_of(toy.server.address, without) == grpc.StatusCode.UNAVAILABLE
        foreign = theirs.tls("peer").model_copy(update={"ca_file": server.ca_file})
        assert await code_of(toy.server.address, ServiceConfig(tls=foreign, token="t")) != grpc.StatusCode.OK


async def test_an_expired_certificate_is_refused_on_either_side(serve: Any, authority: Any) -> None:
    ours = authority("ours")
    server, expired = ours.tls("server", client_auth=True), ours.tls("expired", lasts=-DAY)
    peer = ServiceConfig(tls=ours.tls("peer"), token="t")
    async with serve(ServiceConfig(tls=server, token="t"), peer) as toy:
        old = ServiceConfig(tls=expired, token="t")
        assert await code_of(toy.server.address, old) == grpc.StatusCode.UNAVAILABLE
        assert await code_of(toy.server.address, peer) == grpc.StatusCode.OK
    async with serve(ServiceConfig(tls=expired, token="t"), peer) as toy:
        assert await code_of(toy.server.address, peer) == grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_that_cannot_be_used_is_said_at_the_start(authority: Any) -> None:
    one, other = authority("one").tls("server"), authority("other").tls("server")
    mixed = one.model_copy(update={"key_file": other.key_file})
    with pytest.raises(Unreadable, match="not a certificate and its key"):
        await GrpcServer(ServiceConfig(tls=mixed, token="t"), service="toy").start()
    with pytest.raises(Unreadable, match="not a certificate and its key"):
        open_channel("127.0.0.1:1", ServiceConfig(tls=mixed, token="t"))
    with pytest.raises(Unreadable, match="no certificate authority"):
        open_channel("127.0.0.1:1", ServiceConfig(tls=TlsConfig(ca_file=one.key_file), token="t"))


async def test_a_server_is_known_by_a_name_other_than_its_address(serve: Any, authority: Any) -> None:
    tls = authority("ours").tls("instances.paceline", server_name="instances.paceline")
    async with serve(ServiceConfig(tls=tls, token="t")) as toy:
        assert (await toy.stub.ListInstances(REQUEST, timeout=60)).instances
        wrong = tls.model_copy(update={"server_name": "gateway.paceline"})
        assert await code_of(toy.server.address, ServiceConfig(tls=wrong, token="t")) != grpc.StatusCode.OK


async def test_with_tls_and_token_the_server_listens_beyond_loopback(serve: Any, authority: Any) -> None:
    config = ServiceConfig(
        host="0.0.0.0", tls=authority("ours").tls("server"), token="t", advertise_host="127.0.0.1"
    )
    async with serve(config) as toy:
        assert (await toy.stub.ListInstances(REQUEST, timeout=60)).instances


def metrics_of(config: ServiceConfig, **headers: str) -> str:
    registry = CollectorRegistry()
    Counter("paceline_toys", "Toys.", registry=registry).inc()
    port = start_metrics_server(config, registry)
    scheme = "http" if config.tls is None else "https"
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{port}/metrics", headers=headers)
    context = None if config.tls is None else ssl.create_default_context(cafile=str(config.tls.ca_file))
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return str(answer.read().decode())


def test_metrics_are_served_in_plain_text_on_loopback() -> None:
    assert "paceline_toys_total 1.0" in metrics_of(ServiceConfig())


def test_metrics_over_tls_ask_for_the_token(authority: Any) -> None:
    config = ServiceConfig(tls=authority("ours").tls("server"), token="t")
    assert "paceline_toys_total 1.0" in metrics_of(config, Authorization="Bearer t")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        metrics_of(config)


def test_metrics_under_mutual_tls_ask_for_a_certificate(authority: Any) -> None:
    config = ServiceConfig(tls=authority("ours").tls("server", client_auth=True), token="t")
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        metrics_of(config, Authorization="Bearer t")


def test_a_client_that_does_not_shake_hands_holds_up_nobody(authority: Any) -> None:
    config = ServiceConfig(tls=authority("ours").tls("server"), token="t")
    registry = CollectorRegistry()
    port = start_metrics_server(config, registry)
    with socket.create_connection(("127.0.0.1", port)):
        context = ssl.create_default_context(cafile=str(config.tls.ca_file if config.tls else None))
        request = urllib.request.Request(
            f"https://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer t"}
        )
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_idle_connections_to_a_metrics_port_are_few_and_keep_no_scrape_out(
    authority: Any, tls: bool
) -> None:
    config = ServiceConfig(tls=authority("ours").tls("server") if tls else None)
    port = start_metrics_server(config, CollectorRegistry())
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(MAX_CONNECTIONS + 40)]
    try:
        # The first ones make way for the last ones, whose handshake or request never comes.
        assert not any(connection.recv(1) for connection in idle[:40])
        # A thread outlives its connection by a moment.
        await until(lambda: threading.active_count() <= before + MAX_CONNECTIONS, "the threads end")
        context = ssl.create_default_context(cafile=str(config.tls.ca_file)) if config.tls else None
        url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/metrics"
        answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=60, context=context)
        assert answer.status == 200
        answer.close()
    finally:
        for connection in idle:
            connection.close()
