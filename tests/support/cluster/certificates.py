"""Secrets that cert-manager makes of Certificates."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
Secret = dict[str, bytes]


def issued(certificate: Mapping[str, Any], authority: Mapping[str, bytes] | None) -> Secret:
    """Return the secret of a Certificate, signed by an authority's secret, or by itself if there is none.

    ValueError for an authority's certificate without isCA.
    """
    spec = certificate["spec"]
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec.get("commonName", spec["secretName"]))])
    issuer, signer, root = name, key, None
    if authority is not None:
        root = x509.load_pem_x509_certificate(authority["tls.crt"])
        if not root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise ValueError(f"{certificate['metadata']['name']}: its issuer is no authority")
        issuer = root.subject
        signer = serialization.load_pem_private_key(authority["tls.key"], None)
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _duration(spec["duration"]))
        .add_extension(x509.BasicConstraints(spec.get("isCA", False), None), critical=True)
    )
    if names := spec.get("dnsNames"):
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(each) for each in names]), False
        )
    usages = [_USAGES[each] for each in spec.get("usages", []) if each in _USAGES]
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    made = builder.sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    own = made.public_bytes(serialization.Encoding.PEM)
    encoding = spec["privateKey"].get("encoding", "PKCS1")
    shape = {
        "PKCS8": serialization.PrivateFormat.PKCS8,
        "PKCS1": serialization.PrivateFormat.TraditionalOpenSSL,
    }
    private = key.private_bytes(serialization.Encoding.PEM, shape[encoding], serialization.NoEncryption())
    return {"tls.crt": own, "tls.key": private, "ca.crt": authority["tls.crt"] if authority else own}


def _duration(text: str) -> datetime.timedelta:
    match = re.fullmatch(r"(\d+)h", text)
    if match is None:
        raise ValueError(f"a duration in hours is wanted, not {text}")
    return datetime.timedelta(hours=int(match[1]))
