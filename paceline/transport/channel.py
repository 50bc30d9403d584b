"""Channels to a gateway: addresses, TLS, message limits, keepalive and health.

Addresses are accepted in the forms in which people write them. TLS files are verified with OpenSSL, because gRPC
accepts invalid ones and then fails every handshake.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

import grpc

DEFAULT_PORT = 7400
"""Port of a gateway unless it is configured for another one."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS, PING_TIMEOUT_MS = 5_000, 10_000
"""Milliseconds of silence after which a peer is pinged, and without an answer after which it is given up."""
PROBE_SECONDS = 2.0
"""Time limit of the connection attempt of `speaks_tls`."""
CALLER = "x-paceline-caller"
"""Metadata key for the caller on whose behalf a service makes a call. A gateway accepts it from services alone."""
ON_BEHALF: ContextVar[str] = ContextVar("on_behalf", default="")
"""Caller on whose behalf a service makes its calls; empty: its own calls."""

_PLAIN, _SECURE = ("grpc", "http"), ("grpcs", "https")
_UNIX, _DNS = "unix:", "dns:///"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
# Several gateways may share a name, of which only the leader is healthy.
_LEADERS_ONLY = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)

Options = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Address:
    """Address of one gateway."""

    host: str
    """Name or IP address; empty for a socket in the file system."""
    port: int = DEFAULT_PORT
    path: str = ""
    """Path of a socket in the file system."""

    @property
    def target(self) -> str:
        """The address as gRPC writes it."""
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """True if data sent there stays on this machine."""
        return bool(self.path) or is_loopback(self.host)


def parse_addresses(text: str, *, tls: bool) -> list[Address]:
    """Return the addresses in a text, separated by commas; `tls` says whether the client has TLS.

    Raises:
        ValueError: there is none, or one is invalid; the message says which, and what to write.
    """
    if not isinstance(text, str):
        raise ValueError(f"address {text!r} must be a string, such as 'gateway:{DEFAULT_PORT}'")
    found = [parse_address(each.strip(), tls=tls) for each in text.split(",") if each.strip()]
    if not found:
        raise ValueError(f"address {text!r} must be host:port, or several with commas between")
    return found


def parse_address(text: str, *, tls: bool = False) -> Address:
    """Return one address. ValueError: it is invalid."""
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX).removeprefix("//") or ""
        if not path.strip("/"):
            raise _wrong(text, "names no file; write unix:/path/to/socket")
        return Address("", path=path)
    rest = _without_scheme(text.removeprefix(_DNS), tls)
    rest, slash, path = rest.partition("/")
    if path.strip("/"):
        raise _wrong(text, f"has the path {slash}{path}, which a gateway has not; write host:port")
    host, port = _split(text, rest)
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(text, f"has the port {port!r}; must be a number from 1 to 65535")
    return Address(host, DEFAULT_PORT if port is None else int(port))


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a listener on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_scheme(text: str, tls: bool) -> str:
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    if scheme.lower() not in (*_PLAIN, *_SECURE):
        raise _wrong(text, f"has the scheme {scheme}; write host:port")
    if scheme.lower() in _SECURE and not tls:
        raise _wrong(text, "asks for TLS; give tls as well, such as tls=paceline.Tls()")
    return rest


def _split(text: str, rest: str) -> tuple[str, str | None]:
    """Return the host, and the port if there is one."""
    if rest.startswith("["):
        host, closed, after = rest[1:].partition("]")
        if not closed or not _is_ipv6(host) or (after and not after.startswith(":")):
            raise _wrong(text, "is no IPv6 address; write [::1]:7400")
        return host, after[1:] if after else None
    if rest.count(":") > 1:
        before, _, last = rest.rpartition(":")
        if not _is_ipv6(rest):
            raise _wrong(text, "has several colons and is no IPv6 address; write host:port, or [::1]:7400")
        if len(last) == 4 and last.isdigit() and _is_ipv6(before):
            raise _wrong(
                text, f"can be read in two ways; write [{before}]:{last}, or [{rest}]:{DEFAULT_PORT}"
            )
        return rest, None
    host, colon, port = rest.partition(":")
    if not _HOST.fullmatch(host):
        raise _wrong(text, f"has the host {host!r}, which is none; write host:port")
    return host, port if colon else None


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(f"address {text!r} {why}")


class TlsFileError(ValueError):
    """Raised for a TLS file with wrong content; the message names the file."""


def check_tls_files(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> None:
    """Check the authorities, and the certificate with its key, if given.

    Raises:
        TlsFileError: a file is invalid, or the key is encrypted or belongs to another certificate.
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
    """Refuse an encrypted key. Otherwise OpenSSL would ask for its password on the terminal."""
    raise TlsFileError("the private key is encrypted; it must not be")


def speaks_tls(address: Address) -> bool:
    """Return True if a TLS handshake succeeds at an address, or is refused by TLS. Nothing is sent or trusted."""
    if address.path:
        return False
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), socket.create_connection((address.host, address.port), PROBE_SECONDS) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=address.host):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
    return False


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the gateway; mutual TLS with a certificate and a key."""

    ca_file: Path | None = None
    """Trusted certificate authorities (PEM); None: the system's authorities."""
    cert_file: Path | None = None
    """Certificate of the client (PEM), for mutual TLS; None: none."""
    key_file: Path | None = None
    """Private key of the certificate (PEM), not encrypted."""
    server_name: str | None = None
    """Name expected in the server's certificate, if it differs from the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return the credentials of a channel.

        Raises:
            TlsFileError: a file has wrong content, which gRPC would report as an unreachable gateway.
            OSError: a file cannot be read.
        """
        paths = (self.ca_file, self.cert_file, self.key_file)
        ca, cert, key = (path.read_bytes() if path else None for path in paths)
        if (self.cert_file is None) != (self.key_file is None):
            given, lacking = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise TlsFileError(f"{given} is given without {lacking}: mutual TLS needs both")
        check_tls_files(*paths)
        return grpc.ssl_channel_credentials(ca, key, cert)


def keepalive_options() -> Options:
    """Return options with which either end notices within 15 s that the other has vanished."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        # gRPC never starts the timer of the previous option, and waits a minute for answers to its pings.
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        # By default, after two pings without data from this end, as in a stream of samples, pings are a minute
        # apart. The pings that gRPC makes to find the window size count as well.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(tls: Tls | None, leaders_only: bool = False, use_proxy: bool = False) -> Options:
    """Return options: the gateway's message limits; a lost peer is noticed within 15 s, its return within 1 s.

    With `leaders_only`, calls are made to addresses whose health is SERVING; without any they fail with
    UNAVAILABLE. Proxies that the environment names are ignored unless `use_proxy`.
    """
    options: Options = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        *keepalive_options(),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time limit of a connection attempt, which is slow on a busy machine.
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),
        # Otherwise a new channel to the same address would share the connection of the old one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", int(use_proxy)),
    ]
    if leaders_only:
        options.append(("grpc.service_config", _LEADERS_ONLY))
    if tls and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def open_channel(
    address: str, tls: Tls | None, leaders_only: bool = False, use_proxy: bool = False
) -> grpc.Channel:
    """Return a blocking channel; it connects on the first call."""
    options = channel_options(tls, leaders_only, use_proxy)
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, tls.credentials(), options)


def open_aio_channel(
    address: str, tls: Tls | None, leaders_only: bool = False, use_proxy: bool = False
) -> grpc.aio.Channel:
    """Return a grpc.aio channel, which belongs to the running event loop."""
    options = channel_options(tls, leaders_only, use_proxy)
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, tls.credentials(), options)


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call: the bearer token, if any, and the caller on whose behalf it is made."""
    bearer = (("authorization", f"Bearer {token}"),) if token else ()
    on_behalf = ON_BEHALF.get()
    return (*bearer, (CALLER, on_behalf)) if on_behalf else bearer
