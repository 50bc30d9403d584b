"""A certificate authority of the tests' own."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.platform.config import TlsConfig

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates for 127.0.0.1; its files are `<name>-<subject>.crt`, `.key` and `.ca` in the folder."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def pem(self) -> bytes:
        """The authority's own certificate."""
        basic = x509.BasicConstraints(ca=True, path_length=0)
        made = certificate_of(self.name, self.name, self.key, DAY).add_extension(basic, critical=True)
        return as_pem(made.sign(self.key, hashes.SHA256()))

    def tls(self, subject: str, *, lasts: datetime.timedelta = DAY, **settings: Any) -> TlsConfig:
        """TLS settings with a new certificate for `subject`, and this authority as the trusted one.

        It expires `lasts` from now (or did, if that is negative). A second call replaces the files.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(subject), x509.IPAddress(ip_address("127.0.0.1"))]
        certificate = certificate_of(subject, self.name, key, lasts).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        paths = {part: self.folder / f"{self.name}-{subject}.{part}" for part in ("crt", "key", "ca")}
        replace(paths["crt"], as_pem(certificate.sign(self.key, hashes.SHA256())))
        replace(
            paths["key"],
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
        replace(paths["ca"], self.pem)
        return TlsConfig(cert_file=paths["crt"], key_file=paths["key"], ca_file=paths["ca"], **settings)


def replace(path: Path, content: bytes) -> None:
    """Put another file in its place, as those who rotate secrets do."""
    part = path.with_name(f"{path.name}.new")
    part.write_bytes(content)
    os.replace(part, path)


def certificate_of(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, lasts: datetime.timedelta
) -> x509.CertificateBuilder:
    """Return the beginning of a certificate that expires `lasts` from now."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now + lasts)
    )


def as_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as it stands in files."""
    return certificate.public_bytes(serialization.Encoding.PEM)
