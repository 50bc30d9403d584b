"""Certificates of this process, as currently on disk."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from paceline.tls_files import TlsFileError, check_tls_files, no_password
from services.platform.config.settings import TlsConfig
from services.platform.config.watched import Unreadable, Watched


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts: this process's key and certificate chain, and the authorities that it trusts. None: not set."""

    key: bytes | None
    chain: bytes | None
    roots: bytes | None


def read_certificates(tls: TlsConfig) -> Certificates:
    """Read and verify the files.

    OSError if one does not exist, Unreadable if key, certificate or authorities are invalid or do not match.
    """
    found = Certificates(_read(tls.key_file), _read(tls.cert_file), _read(tls.ca_file))
    _check(tls)
    if found != Certificates(_read(tls.key_file), _read(tls.cert_file), _read(tls.ca_file)):
        raise Unreadable("the certificate files are being replaced")
    return found


def watch_certificates(tls: TlsConfig) -> Watched[Certificates]:
    """Return the certificates, reloaded when a file changes. Raises as `read_certificates`."""
    paths = [path for path in (tls.key_file, tls.cert_file, tls.ca_file) if path is not None]
    return Watched("certificate", paths, lambda: read_certificates(tls))


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return the TLS context of an HTTP server. Raises as `read_certificates`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(str(tls.cert_file), str(tls.key_file), password=no_password)
        if tls.client_auth:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cafile=str(tls.ca_file))
    except TlsFileError as error:
        raise Unreadable(str(error)) from error
    except ssl.SSLError as error:
        raise Unreadable(f"{tls.cert_file}, {tls.key_file} or {tls.ca_file}: {error}") from error
    return context


def _check(tls: TlsConfig) -> None:
    try:
        check_tls_files(tls.ca_file, tls.cert_file, tls.key_file)
    except TlsFileError as error:
        raise Unreadable(str(error)) from error


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
