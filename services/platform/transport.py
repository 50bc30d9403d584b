"""gRPC settings that servers and channels have in common, and their credentials."""

from __future__ import annotations

from typing import Any

import grpc

from services.platform.certificates import Certificates, watch_certificates
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
    """Credentials to serve with; each new connection gets the certificate that is on disk then.

    OSError when a file cannot be read, Unreadable when it is no good, ValueError without a certificate.
    """
    if tls.cert_file is None or tls.key_file is None:
        raise ValueError("tls.cert_file and tls.key_file are needed to serve with TLS")
    watched = watch_certificates(tls)
    shown = watched.current()

    def changed() -> Any:  # None for no change, which the stubs of grpc do not know
        nonlocal shown
        now = watched.current()
        if now is shown:
            return None
        shown = now
        return _shown(now, tls)

    return grpc.dynamic_ssl_server_credentials(_shown(shown, tls), changed, tls.client_auth)


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Credentials to dial a peer with."""
    return grpc.ssl_channel_credentials(certificates.roots, certificates.key, certificates.chain)


def _shown(certificates: Certificates, tls: TlsConfig) -> grpc.ServerCertificateConfiguration:
    pair: Any = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.roots if tls.client_auth else None)
