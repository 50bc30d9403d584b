"""Stand-ins for cert-manager, Helm's lookups and Valkey's image."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.support.cluster.certificates import issued
from tests.support.cluster.charts import with_file
from tests.support.cluster.valkey import split
from tests.unit.helm.release import container, value_set


def certificate(name: str) -> dict[str, Any]:
    return value_set("defaults").named("Certificate", name)


def test_certificates_are_signed_by_their_authority_and_have_what_they_ask_for() -> None:
    authority = issued(certificate("-ca"), None)
    secret = issued(certificate("-gateway"), authority)
    root, own = (x509.load_pem_x509_certificate(each["tls.crt"]) for each in (authority, secret))
    own.verify_directly_issued_by(root)
    assert secret["ca.crt"] == authority["tls.crt"]
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "paceline-gateway.ml.svc.cluster.local" in names.get_values_for_type(x509.DNSName)
    assert (
        ExtendedKeyUsageOID.SERVER_AUTH in own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    )
    assert b"BEGIN PRIVATE KEY" in secret["tls.key"]
    with pytest.raises(ValueError, match="no authority"):
        issued(certificate("-trainer"), secret)


def test_other_lookups_are_said() -> None:
    with pytest.raises(ValueError, match="not played"):
        with_file('{{ lookup "v1" "Secret" "other" "name" }}')


def test_options_of_tls_are_taken_from_the_chart() -> None:
    arguments = container(value_set("defaults").named("StatefulSet", "-redis"))["args"]
    tls, rest = split(arguments)
    assert set(tls) == {
        f"--tls-{name}" for name in ("port", "cert-file", "key-file", "ca-cert-file", "auth-clients")
    }
    assert rest[:4] == ["--dir", "/data", "--appendonly", "yes"]
    assert "--port" not in rest
    assert rest[rest.index("--save") + 1] == ""
