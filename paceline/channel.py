"""Channels to a gateway: TLS, token, message limits, keepalive, and health."""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from paceline.tls_files import TlsFileError, check_tls_files

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS, PING_TIMEOUT_MS = 5_000, 10_000
"""Milliseconds after which a silent peer is pinged, and for which it has not to answer to be given up."""

# Of several gateways behind one name only the one that leads is healthy.
_LEADERS_ONLY = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)

Options = list[tuple[str, Any]]

ON_BEHALF: ContextVar[str] = ContextVar("on_behalf", default="")
"""For whom a service makes its calls, which go with this in the metadata; empty: for itself."""
CALLER = "x-paceline-caller"
"""Metadata key of that. A gateway believes it of services alone."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the gateway; mutual TLS with a certificate and a key."""

    ca_file: Path | None = None
    """Trusted certificate authorities (PEM); None: those of the system."""
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    """Name expected in the server's certificate, if it differs from the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return the credentials of a channel.

        Raises:
            TlsFileError: a file does not have what it should, which gRPC would tell as a gateway that is not there.
            OSError: one cannot be read.
        """
        paths = (self.ca_file, self.cert_file, self.key_file)
        ca, cert, key = (path.read_bytes() if path else None for path in paths)
        if (self.cert_file is None) != (self.key_file is None):
            given, lacking = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise TlsFileError(f"{given} is given without {lacking}: mutual TLS needs both")
        check_tls_files(*paths)
        return grpc.ssl_channel_credentials(ca, key, cert)


def keepalive_options() -> Options:
    """Return options by which either end notices within 15 s that the other is gone without a word."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        # gRPC never starts the timer of the line above, and waits for a minute for the answers to its pings.
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        # Pings would be a minute apart after two of them for which this end had nothing to say, as in a stream of
        # samples, where gRPC's own pings for the window's size count as well.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(tls: Tls | None, leaders_only: bool = False, use_proxy: bool = False) -> Options:
    """Return options: the gateway's message limits; a lost peer is noticed within 15 s, its return within 1 s.

    With `leaders_only`, calls go to addresses whose health is SERVING; the others fail with UNAVAILABLE. Proxies
    that the environment names are passed by, unless `use_proxy`.
    """
    options: Options = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        *keepalive_options(),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also bounds a connection attempt, which takes long on a busy machine.
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),
        # Without it a new channel to the same address goes on with the connection of the old one.
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
    """Return a grpc.aio channel; it belongs to the running event loop."""
    options = channel_options(tls, leaders_only, use_proxy)
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, tls.credentials(), options)


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call: the bearer token, if there is one, and for whom a service calls."""
    bearer = (("authorization", f"Bearer {token}"),) if token else ()
    on_behalf = ON_BEHALF.get()
    return (*bearer, (CALLER, on_behalf)) if on_behalf else bearer
