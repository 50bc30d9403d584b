"""A toy service behind a real server on a real socket, and certificates to serve it with."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry

from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.platform.channel import open_channel
from services.platform.config import ServiceConfig, TlsConfig
from services.platform.server import GrpcServer

Poll = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
Serve = Callable[..., AbstractAsyncContextManager["Toy"]]


class ToyFleet(fleet_pb2_grpc.FleetServiceServicer):
    """Does what the test asks for."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.instances = [fleet_pb2.Instance(instance_id="toy", epoch=1)]
        self.trailer: tuple[tuple[str, str], ...] = ()
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.left = asyncio.Event()

    async def ListInstances(self, request: Any, context: Any) -> fleet_pb2.ListInstancesResponse:
        """Answers `instances`, or raises `error`."""
        if self.trailer:
            context.set_trailing_metadata(self.trailer)
        if self.error is not None:
            raise self.error
        return fleet_pb2.ListInstancesResponse(instances=self.instances)

    async def WatchFleet(self, request: Any, context: Any) -> AsyncIterator[fleet_pb2.WatchFleetResponse]:
        """Yields once, then raises `error` or goes on until the caller leaves."""
        try:
            self.entered.set()
            yield fleet_pb2.WatchFleetResponse(instances=self.instances)
            if self.error is not None:
                raise self.error
            await self.release.wait()
        finally:
            self.left.set()

    async def Drain(self, request: Any, context: Any) -> fleet_pb2.DrainResponse:
        """Answers once the test releases it."""
        self.entered.set()
        await self.release.wait()
        return fleet_pb2.DrainResponse(handed_over=3)


@dataclass(slots=True)
class Toy:
    """A running toy service and a stub that calls it the way peers do."""

    servicer: ToyFleet
    server: GrpcServer
    registry: CollectorRegistry
    channel: Any
    stub: Any


@pytest.fixture
def serve() -> Serve:
    """`async with serve(config, client=config2)` runs the toy service."""

    @asynccontextmanager
    async def serving(config: ServiceConfig, client: ServiceConfig | None = None) -> AsyncIterator[Toy]:
        registry = CollectorRegistry()
        server = GrpcServer(config, service="toy", registry=registry)
        servicer = ToyFleet()
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server.server)
        await server.start()
        try:
            async with open_channel(server.address, client or config) as channel:
                yield Toy(servicer, server, registry, channel, fleet_pb2_grpc.FleetServiceStub(channel))
        finally:
            await server.stop(0)

    return serving


@pytest.fixture
def poll() -> Poll:
    """Calls until the answer is true, at most ten seconds, and returns it."""

    async def until(call: Callable[[], Awaitable[Any]]) -> Any:
        deadline = time.monotonic() + 10
        while not (answer := await call()):
            assert time.monotonic() < deadline, "did not come true within ten seconds"
            await asyncio.sleep(0.02)
        return answer

    return until


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority of the test's own."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def tls(self, subject: str, **settings: Any) -> TlsConfig:
        """TLS settings with a certificate for 127.0.0.1 and `subject`, and this authority's as trusted."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(subject), x509.IPAddress(ip_address("127.0.0.1"))]
        certificate = _builder(subject, self.name, key).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        paths = {part: self.folder / f"{self.name}-{subject}.{part}" for part in ("crt", "key", "ca")}
        paths["crt"].write_bytes(_pem(certificate.sign(self.key, hashes.SHA256())))
        paths["key"].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        paths["ca"].write_bytes(_pem(self.certificate))
        return TlsConfig(cert_file=paths["crt"], key_file=paths["key"], ca_file=paths["ca"], **settings)


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[str], Authority]:
    """Makes a certificate authority of the given name."""

    def make(name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        return Authority(tmp_path, name, key, builder.sign(key, hashes.SHA256()))

    return make


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
