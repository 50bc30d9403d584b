"""gRPC settings that servers and channels have in common, and their credentials."""

from __future__ import annotations

from pathlib import Path

import grpc

from services.platform.config import ServiceConfig, TlsConfig

Options = list[tuple[str, int | str]]

KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 10_000, 5_000
"""A silent connection is pinged after the first and given up after the second."""


def common_options(config: ServiceConfig) -> Options:
    """Message limits and keepalive, the same on both ends."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(config: ServiceConfig) -> Options:
    """As `common_options`, and: pings of clients are welcome, and a port belongs to one process only."""
    return [
        *common_options(config),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def channel_options(config: ServiceConfig) -> Options:
    """As `common_options`, and: a peer that came back is found within a second, never through a proxy."""
    options: Options = [
        *common_options(config),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]
    if config.tls is not None and config.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", config.tls.server_name))
    return options


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials to serve with. OSError when a file cannot be read."""
    pair = (_required(tls.key_file), _required(tls.cert_file))
    roots = _read(tls.ca_file) if tls.client_auth else None
    return grpc.ssl_server_credentials([pair], roots, tls.client_auth)


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Credentials to dial a peer with. OSError when a file cannot be read."""
    return grpc.ssl_channel_credentials(_read(tls.ca_file), _read(tls.key_file), _read(tls.cert_file))


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def _required(path: Path | None) -> bytes:
    if path is None:
        raise ValueError("tls.cert_file and tls.key_file are needed to serve with TLS")
    return path.read_bytes()
