"""Secrets that cert-manager makes of Certificates."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.certificates import as_pem, certificate_of

_USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
_SHAPES = {
    "PKCS8": serialization.PrivateFormat.PKCS8,
    "PKCS1": serialization.PrivateFormat.TraditionalOpenSSL,
}
Secret = dict[str, bytes]


def issued(certificate: Mapping[str, Any], authority: Mapping[str, bytes] | None) -> Secret:
    """Return the secret of a Certificate, signed by an authority's secret, or by itself if there is none.

    ValueError for an authority's certificate without isCA, and for a duration that is not in hours.
    """
    spec, key = certificate["spec"], ec.generate_private_key(ec.SECP256R1())
    subject = issuer = spec.get("commonName", spec["secretName"])
    signer: Any = key
    if authority is not None:
        root = x509.load_pem_x509_certificate(authority["tls.crt"])
        if not root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise ValueError(f"{certificate['metadata']['name']}: its issuer is no authority")
        issuer = root.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        signer = serialization.load_pem_private_key(authority["tls.key"], None)
    lasts = datetime.timedelta(hours=int(spec["duration"].removesuffix("h")))
    made = certificate_of(subject, issuer, key, lasts).add_extension(
        x509.BasicConstraints(spec.get("isCA", False), None), critical=True
    )
    if names := [x509.DNSName(each) for each in spec.get("dnsNames", [])]:
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usages := [_USAGES[each] for each in spec.get("usages", []) if each in _USAGES]:
        made = made.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    own = as_pem(made.sign(signer, hashes.SHA256()))
    shape = _SHAPES[spec["privateKey"].get("encoding", "PKCS1")]
    private = key.private_bytes(serialization.Encoding.PEM, shape, serialization.NoEncryption())
    return {"tls.crt": own, "tls.key": private, "ca.crt": authority["tls.crt"] if authority else own}
