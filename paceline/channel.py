"""How a client connects: TLS, the token, message limits, keepalive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

Options = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the gateway; with a certificate and key also in the other direction."""

    ca_file: Path | None = None
    """Certificate authorities trusted (PEM); None: those of the system."""
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    """Name expected in the server's certificate, where it is not the address dialled."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files."""
        paths = (self.ca_file, self.key_file, self.cert_file)
        ca, key, cert = (path.read_bytes() if path else None for path in paths)
        return grpc.ssl_channel_credentials(ca, key, cert)


def channel_options(tls: Tls | None) -> Options:
    """Limits as the gateway has them; a lost peer is noticed within 15 s, a returned one within a second."""
    options: Options = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also bounds a connection attempt, which takes long on a busy machine.
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),
    ]
    if tls and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    """A channel for the sync client; connects on the first call."""
    if tls is None:
        return grpc.insecure_channel(address, channel_options(tls))
    return grpc.secure_channel(address, tls.credentials(), channel_options(tls))


def open_aio_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel for the async client; belongs to the running event loop."""
    if tls is None:
        return grpc.aio.insecure_channel(address, channel_options(tls))
    return grpc.aio.secure_channel(address, tls.credentials(), channel_options(tls))


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call: the bearer token."""
    return (("authorization", f"Bearer {token}"),) if token else ()
