"""Certificates and tokens that change under a running server and under an open channel."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter

from paceline.tokens import hash_token
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.config import ServiceConfig, TlsConfig
from services.platform.grpc.channel import open_channel
from services.platform.observability.http_ports import start_metrics_server
from tests.support.certificates import replace

pytestmark = pytest.mark.usefixtures("immediate")

REQUEST = fleet_pb2.ListInstancesRequest()


async def code_of(address: str, config: ServiceConfig) -> grpc.StatusCode:
    """Return the outcome of one call on a channel of its own."""
    async with open_channel(address, config) as channel:
        return await code_on(fleet_pb2_grpc.FleetServiceStub(channel))


async def code_on(stub: Any) -> grpc.StatusCode:
    try:
        await stub.ListInstances(REQUEST, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def renamed(tls: TlsConfig, folder: Path, name: str) -> TlsConfig:
    """Return the same certificates in files that stay as they are."""
    changes = {}
    for field in ("cert_file", "key_file", "ca_file"):
        path = folder / f"{name}-{field}"
        path.write_bytes(getattr(tls, field).read_bytes())
        changes[field] = path
    return tls.model_copy(update=changes)


async def test_a_server_shows_its_new_certificate_to_new_connections(
    serve: Any, authority: Any, tmp_path: Path
) -> None:
    old, new = authority("old"), authority("new")
    server = renamed(old.tls("server"), tmp_path, "live")
    trusts_old, trusts_new = (
        ServiceConfig(tls=TlsConfig(ca_file=each.tls("client").ca_file), token="t") for each in (old, new)
    )
    async with serve(ServiceConfig(tls=server, token="t"), trusts_old) as toy:
        assert await code_of(toy.server.address, trusts_new) == grpc.StatusCode.UNAVAILABLE
        stream = toy.stub.WatchFleet(fleet_pb2.WatchFleetRequest())
        await anext(aiter(stream))
        fresh = new.tls("server")
        for field in ("key_file", "cert_file"):
            replace(getattr(server, field), getattr(fresh, field).read_bytes())
        assert await code_of(toy.server.address, trusts_new) == grpc.StatusCode.OK
        assert await code_of(toy.server.address, trusts_old) == grpc.StatusCode.UNAVAILABLE
        toy.servicer.release.set()
        assert [each async for each in stream] == [], "the stream that was open ended by itself"
        assert await stream.code() == grpc.StatusCode.OK


async def test_a_key_without_its_certificate_changes_nothing(
    serve: Any, authority: Any, tmp_path: Path
) -> None:
    ours = authority("ours")
    server = renamed(ours.tls("server"), tmp_path, "live")
    client = ServiceConfig(tls=TlsConfig(ca_file=ours.tls("client").ca_file), token="t")
    async with serve(ServiceConfig(tls=server, token="t"), client) as toy:
        fresh = ours.tls("server")
        assert server.key_file is not None
        assert fresh.key_file is not None
        replace(server.key_file, fresh.key_file.read_bytes())
        assert await code_of(toy.server.address, client) == grpc.StatusCode.OK
        replace(server.key_file, b"-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n")
        assert await code_of(toy.server.address, client) == grpc.StatusCode.OK


async def test_an_open_channel_goes_on_with_the_new_certificate(
    serve: Any, authority: Any, tmp_path: Path
) -> None:
    old, new = authority("old"), authority("new")
    server = renamed(old.tls("server", client_auth=True), tmp_path, "live")
    peer = renamed(old.tls("peer"), tmp_path, "peer")
    async with serve(ServiceConfig(tls=server, token="t"), ServiceConfig(tls=peer, token="t")) as toy:
        stub = fleet_pb2_grpc.FleetServiceStub(toy.channel)
        stream = stub.WatchFleet(fleet_pb2.WatchFleetRequest())
        await anext(aiter(stream))
        for mine, fresh in ((server, new.tls("server")), (peer, new.tls("peer"))):
            for field in ("ca_file", "key_file", "cert_file"):
                replace(getattr(mine, field), getattr(fresh, field).read_bytes())
        assert await code_on(stub) == grpc.StatusCode.OK
        strangers = ServiceConfig(tls=old.tls("peer"), token="t")
        assert await code_of(toy.server.address, strangers) == grpc.StatusCode.UNAVAILABLE
        toy.servicer.release.set()
        assert [each async for each in stream] == []


async def test_the_services_token_is_changed_in_its_file(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    config = ServiceConfig(token_file=file)
    async with serve(config) as toy:
        assert await code_on(toy.stub) == grpc.StatusCode.OK
        replace(file, b"second\n")
        assert await code_on(toy.stub) == grpc.StatusCode.OK, "both ends have read it again"
        assert await code_of(toy.server.address, ServiceConfig(token="first")) == (
            grpc.StatusCode.UNAUTHENTICATED
        )
        replace(file, b"")
        assert await code_of(toy.server.address, ServiceConfig(token="second")) == grpc.StatusCode.OK


async def test_a_callers_token_is_added_and_taken_away(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"

    def accept(*tokens: str) -> None:
        entries = [{"name": f"of-{t}", "sha256": hash_token(t), "scopes": ["fleet"]} for t in tokens]
        replace(file, yaml.safe_dump(entries).encode())

    accept("one")
    config = ServiceConfig(tokens_file=file)
    async with serve(config, ServiceConfig(token="one")) as toy:
        assert await code_on(toy.stub) == grpc.StatusCode.OK
        other = ServiceConfig(token="two")
        assert await code_of(toy.server.address, other) == grpc.StatusCode.UNAUTHENTICATED
        accept("one", "two")
        assert await code_of(toy.server.address, other) == grpc.StatusCode.OK
        accept("two")
        assert await code_on(toy.stub) == grpc.StatusCode.UNAUTHENTICATED
        replace(file, b"- {")
        assert await code_of(toy.server.address, other) == grpc.StatusCode.OK, "the last good list stays"
        accept()
        assert await code_of(toy.server.address, other) == grpc.StatusCode.UNAUTHENTICATED


def scrape(port: int, ca_file: Path | None, token: str) -> str:
    url = f"https://127.0.0.1:{port}/metrics"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    context = ssl.create_default_context(cafile=str(ca_file))
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return str(answer.read().decode())


def test_the_metrics_port_follows_certificates_and_tokens(authority: Any, tmp_path: Path) -> None:
    old, new = authority("old"), authority("new")
    server = renamed(old.tls("server"), tmp_path, "live")
    file = tmp_path / "tokens.yaml"
    entries = [{"name": n, "sha256": hash_token(n), "scopes": [n]} for n in ("metrics", "rollouts")]
    file.write_text(yaml.safe_dump(entries))
    registry = CollectorRegistry()
    Counter("paceline_toys", "Toys.", registry=registry).inc()
    port = start_metrics_server(ServiceConfig(tls=server, tokens_file=file), registry)
    old_ca, new_ca = old.tls("x").ca_file, new.tls("x").ca_file
    assert "paceline_toys_total 1.0" in scrape(port, old_ca, "metrics")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        scrape(port, old_ca, "rollouts")
    fresh = new.tls("server")
    for field in ("key_file", "cert_file"):
        replace(getattr(server, field), getattr(fresh, field).read_bytes())
    assert "paceline_toys_total 1.0" in scrape(port, new_ca, "metrics")
    replace(file, yaml.safe_dump(entries[1:]).encode())
    with pytest.raises(urllib.error.HTTPError, match="401"):
        scrape(port, new_ca, "metrics")
