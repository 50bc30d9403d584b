"""TLS between client and gateway."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import paceline
from paceline import Client, RetryPolicy, Tls
from tests.integration.sdk.gateway_double import GatewayDouble

ONCE = RetryPolicy(seconds=0)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for gateway.example, and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    name = ["-subj", "/CN=gateway.example", "-addext", "subjectAltName=DNS:gateway.example"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    out = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *kind, *name, *out], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def secure_gateway(certificate: tuple[Path, Path]) -> Iterator[GatewayDouble]:
    cert, key = (path.read_bytes() for path in certificate)
    credentials = grpc.ssl_server_credentials([(key, cert)])
    with GatewayDouble(credentials) as double:
        yield double


def test_a_trusted_gateway_is_talked_to(
    secure_gateway: GatewayDouble, certificate: tuple[Path, Path]
) -> None:
    tls = Tls(ca_file=certificate[0], server_name="gateway.example")
    with Client(secure_gateway.address, token="secret", tls=tls) as client:
        assert client.versions().policy_version == 4
    assert secure_gateway.state.calls[0][1]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("tls", [None, Tls()], ids=["plain text", "foreign authority"])
def test_others_are_refused(secure_gateway: GatewayDouble, tls: Tls | None) -> None:
    client = Client(secure_gateway.address, tls=tls, retry=ONCE)
    with client, pytest.raises(paceline.UnavailableError):
        client.versions()
    assert secure_gateway.state.calls == []


def test_the_name_in_the_certificate_counts(
    secure_gateway: GatewayDouble, certificate: tuple[Path, Path]
) -> None:
    client = Client(secure_gateway.address, tls=Tls(ca_file=certificate[0]), retry=ONCE)
    with client, pytest.raises(paceline.UnavailableError):
        client.versions()
