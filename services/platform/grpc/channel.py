"""Channel to a peer, with the TLS, token and limits of this service."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import grpc
import structlog

from paceline.address import is_loopback
from paceline.channel import keepalive_options
from services.platform.config.settings import ServiceConfig, TlsConfig
from services.platform.grpc.interceptor import REQUEST_ID
from services.platform.observability import tracing
from services.platform.observability.span import TRACE_PARENT
from services.platform.security.certificates import Certificates, watch_certificates
from services.platform.security.guard import own_token

Options = list[tuple[str, int | str]]

Metadata = tuple[tuple[str, str], ...]
Dial = Callable[[], grpc.aio.Channel]
_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
"""Methods of a channel that make the calls of a stub."""


def common_options(config: ServiceConfig) -> Options:
    """Return message limits and keepalive, the same on both ends."""
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        *keepalive_options(),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def channel_options(config: ServiceConfig) -> Options:
    """Return the options of a channel: it tries to reconnect every second and never uses a proxy."""
    options: Options = [
        *common_options(config),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long an attempt may take to which nobody says no: on a busy machine, seconds.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]
    if config.tls is not None and config.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", config.tls.server_name))
    return options


def open_channel(address: str, config: ServiceConfig) -> grpc.aio.Channel:
    """Return a channel to "host:port", which connects at first use. Its calls carry the token and the request id.

    ValueError if the token would travel in plain text beyond loopback (and `config.insecure` is unset); OSError or
    Unreadable if the certificates cannot be used.
    """
    token = own_token(config)
    options = channel_options(config)
    if config.tls is not None:
        return cast(grpc.aio.Channel, _CallerChannel(_redialling(address, config.tls, options), token))
    if token() is not None and not config.insecure and not is_loopback(address.rpartition(":")[0]):
        raise ValueError(f"will not send the token to {address} in plain text; set tls, or insecure")
    plain = grpc.aio.insecure_channel(address, options)
    return cast(grpc.aio.Channel, _CallerChannel(lambda: plain, token))


def _redialling(address: str, tls: TlsConfig, options: Options) -> Dial:
    """Return a function that returns a channel with the current certificates, a new one when they have changed."""
    watched = watch_certificates(tls)
    dialled: tuple[Certificates, grpc.aio.Channel] | None = None

    def dial() -> grpc.aio.Channel:
        nonlocal dialled
        certificates = watched.current()
        if dialled is None or dialled[0] is not certificates:
            pems = (certificates.roots, certificates.key, certificates.chain)
            channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pems), options)
            dialled = (certificates, channel)
        return dialled[1]

    return dial


class _CallerChannel:
    """Adds metadata to every call, and makes each on the channel that `dial` gives at that time.

    A wrapper rather than client interceptors: those put a task and a queue between caller and stream. A channel
    that was replaced lives until this one is closed, for the streams that are still on it.
    """

    def __init__(self, dial: Dial, token: Callable[[], str | None]) -> None:
        self._dial = dial
        self._token = token
        self._channels: list[grpc.aio.Channel] = []
        self._current()

    def __getattr__(self, name: str) -> Any:
        if name in _CALLS:
            return lambda *args, **kwargs: self._on_current(lambda on: getattr(on, name)(*args, **kwargs))
        return getattr(self._current(), name)

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels:
            await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _current(self) -> grpc.aio.Channel:
        channel = self._dial()
        if not self._channels or self._channels[-1] is not channel:
            self._channels.append(channel)
        return channel

    def _on_current(self, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        channel = self._current()
        method = make(channel)

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            nonlocal channel, method
            current = self._current()
            if current is not channel:
                channel, method = current, make(current)
            given = tuple(metadata or ())
            followed = (*_bearer(self._token()), *_trace_parent(given), *_request_id(given))
            return method(*args, metadata=(*given, *followed), **kwargs)

        return call


def _bearer(token: str | None) -> Metadata:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _trace_parent(given: tuple[tuple[str, Any], ...]) -> Metadata:
    """Return the span of the request being served, so that the peer continues its trace."""
    parent = tracing.current().traceparent
    if not parent or any(key == TRACE_PARENT for key, _ in given):
        return ()
    return ((TRACE_PARENT, parent),)


def _request_id(given: tuple[tuple[str, Any], ...]) -> Metadata:
    """Return the id of the request being served, so that one id follows a request through all services."""
    current = structlog.contextvars.get_contextvars().get("request_id")
    if current is None or any(key == REQUEST_ID for key, _ in given):
        return ()
    return ((REQUEST_ID, str(current)),)
