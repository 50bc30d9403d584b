"""Load certificates and other secrets from files, and reload them when the files change.

With `Watched`, certificates and tokens can be rotated without a restart.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog
from prometheus_client import Counter

from paceline.transport.channel import TlsFileError, check_tls_files, no_password
from services.platform.config import TlsConfig

log = structlog.get_logger(__name__)

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""Least seconds between two checks of the files."""

RELOADS = Counter(
    "paceline_secret_reloads_total",
    "Certificates and tokens changed on disk: reloaded; failed (the old ones stay in use).",
    ["secret", "outcome"],
)


class Unreadable(Exception):
    """The files have invalid contents; the message names the file and the reason."""


class Watched(Generic[T]):
    """Value that `load` returns for the current contents of some files; thread-safe.

    After a change that cannot be loaded, such as a key that was replaced before its certificate, the last good
    value stays and the next check tries again. Symbolic links are followed, so that a redirected one (as Kubernetes
    does with secrets) counts as a change.
    """

    def __init__(
        self,
        secret: str,
        paths: Iterable[Path],
        load: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the value, raising the errors of `load`; `secret` names the value in logs and metrics."""
        self._secret = secret
        self._paths = tuple(paths)
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_at = clock()
        self._seen = self._signature()
        self._failing = False
        self._value = load()

    def current(self) -> T:
        """Return the value; check the files if the last check is CHECK_SECONDS ago."""
        with self._lock:
            now = self._clock()
            if now - self._checked_at >= CHECK_SECONDS:
                self._checked_at = now
                self._refresh()
            return self._value

    def _refresh(self) -> None:
        # Taken before the files are read, so that the next check sees changes made meanwhile.
        signature = self._signature()
        if signature == self._seen:
            return
        try:
            self._value = self._load()
        except (OSError, ValueError, Unreadable) as error:
            if not self._failing:
                log.error("secret_not_reloaded", secret=self._secret, error=str(error))
                RELOADS.labels(self._secret, "failed").inc()
            self._failing = True
            return
        self._seen, self._failing = signature, False
        RELOADS.labels(self._secret, "reloaded").inc()
        log.info("secret_reloaded", secret=self._secret)

    def _signature(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_identity(path) for path in self._paths)


def _identity(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts: this process's key and certificate chain, and the authorities that it trusts. None: not set."""

    key: bytes | None
    chain: bytes | None
    roots: bytes | None


# By their files.
_certificates: dict[tuple[Path | None, ...], Watched[Certificates]] = {}


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
    """Return the certificates, reloaded when a file changes: one value for all users of the files in this process.

    So whoever begins to use them while files are being replaced gets the last good ones. Raises as
    `read_certificates`, if none in this process has been good.
    """
    files = (tls.key_file, tls.cert_file, tls.ca_file)
    if files not in _certificates:
        paths = [path for path in files if path is not None]
        _certificates[files] = Watched("certificate", paths, lambda: read_certificates(tls))
    return _certificates[files]


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
