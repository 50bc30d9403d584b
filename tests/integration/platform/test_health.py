"""The probe that containers run, against a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.platform.config import ServiceConfig
from services.platform.grpc import health


async def probe(*arguments: str, **environ: str) -> int:
    return await asyncio.to_thread(health.main, ("--timeout", "30", *arguments), environ)


async def test_the_probe_tells_a_service_that_serves_from_one_that_only_lives(serve: Any) -> None:
    async with serve(ServiceConfig(token="t")) as toy:
        assert await probe("--address", toy.server.address) == health.UNHEALTHY
        assert await probe("--address", toy.server.address, "--service", "liveness") == 0
        await toy.server.set_serving(True)
        assert await probe("--address", toy.server.address) == 0
    assert await probe("--address", toy.server.address, "--service", "liveness") == health.UNHEALTHY


async def test_the_probe_finds_the_port_in_the_ready_file(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    assert await probe(PACELINE_READY_FILE=str(file)) == health.UNHEALTHY
    async with serve(ServiceConfig()) as toy:
        await toy.server.set_serving(True)
        port = toy.server.address.rpartition(":")[2]
        # A name that only peers can resolve, as in a cluster.
        file.write_text(json.dumps({"pid": 1, "address": f"gateway.invalid:{port}", "metrics_port": 0}))
        assert await probe(PACELINE_READY_FILE=str(file), PACELINE_HOST="0.0.0.0") == 0


async def test_the_probe_shows_the_certificate_of_the_service(serve: Any, authority: Any) -> None:
    tls = authority("ours").tls("gateway.paceline.svc", client_auth=True)
    files = {
        "PACELINE_TLS__CA_FILE": str(tls.ca_file),
        "PACELINE_TLS__CERT_FILE": str(tls.cert_file),
        "PACELINE_TLS__KEY_FILE": str(tls.key_file),
    }
    async with serve(ServiceConfig(tls=tls, token="t")) as toy:
        await toy.server.set_serving(True)
        address = ("--address", toy.server.address)
        named = (*address, "--server-name", "gateway.paceline.svc")
        assert await probe(*named, **files) == 0
        assert await probe(*address, "--server-name", "drafts.paceline.svc", **files) == health.UNHEALTHY
        assert await probe("--address", toy.server.address) == health.UNHEALTHY


async def test_the_probe_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert await probe() == health.UNHEALTHY
    assert "PACELINE_READY_FILE" in capsys.readouterr().err
    assert await probe("--address", "127.0.0.1:1") == health.UNHEALTHY
    assert "127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err
