"""Files of TLS, verified with OpenSSL: gRPC accepts invalid ones, and then fails every handshake."""

from __future__ import annotations

import ssl
from pathlib import Path


class TlsFileError(ValueError):
    """Raised for a file of TLS that does not have what it should; the message names it."""


def check_tls_files(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> None:
    """Check authorities, and a certificate with its key, each where it is given.

    Raises:
        TlsFileError: a file is invalid, the key is encrypted, or it is not the certificate's.
        OSError: a file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if cert_file is not None and key_file is not None:
        try:
            context.load_cert_chain(cert_file, key_file, password=no_password)
        except ssl.SSLError as error:
            reason = "not a certificate and its key (no certificate in PEM, or another's key)"
            raise TlsFileError(f"{cert_file} and {key_file} are {reason}: {error}") from error
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=ca_file)
        except ssl.SSLError as error:
            raise TlsFileError(f"{ca_file} holds no certificate authority in PEM: {error}") from error


def no_password() -> str:
    """Refuse an encrypted key: without this OpenSSL would ask the terminal for its password."""
    raise TlsFileError("the private key is encrypted; it must not be")
