"""The way to a peer: a channel with this service's TLS, token and limits."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from services.platform import tracing
from services.platform.certificates import Certificates, watch_certificates
from services.platform.config import ServiceConfig, TlsConfig, is_loopback
from services.platform.guard import own_token
from services.platform.interceptor import REQUEST_ID
from services.platform.transport import Options, channel_credentials, channel_options

Metadata = tuple[tuple[str, str], ...]
Dial = Callable[[], grpc.aio.Channel]


def open_channel(address: str, config: ServiceConfig) -> grpc.aio.Channel:
    """A channel to "host:port"; connects at first use. Its calls carry the token and the request id.

    ValueError when the token would travel in plain text beyond loopback (and `config.insecure` is unset);
    OSError or Unreadable when the certificates are no good.
    """
    token = own_token(config)
    options = channel_options(config)
    if config.tls is not None:
        return _CallerChannel(_redialling(address, config.tls, options), token)
    if token() is not None and not config.insecure and not is_loopback(address.rpartition(":")[0]):
        raise ValueError(f"will not send the token to {address} in plain text; set tls, or insecure")
    plain = grpc.aio.insecure_channel(address, options)
    return _CallerChannel(lambda: plain, token)


def _redialling(address: str, tls: TlsConfig, options: Options) -> Dial:
    """Gives the channel with the certificates that are on disk now: another one when they have changed."""
    watched = watch_certificates(tls)
    dialled: tuple[Certificates, grpc.aio.Channel] | None = None

    def dial() -> grpc.aio.Channel:
        nonlocal dialled
        certificates = watched.current()
        if dialled is None or dialled[0] is not certificates:
            channel = grpc.aio.secure_channel(address, channel_credentials(certificates), options)
            dialled = (certificates, channel)
        return dialled[1]

    return dial


class _CallerChannel(grpc.aio.Channel):
    """Adds metadata to every call, and makes each on the channel that `dial` gives at that time.

    A wrapper rather than client interceptors: those put a task and a queue between caller and stream. A channel
    that was replaced lives until this one is closed, for the streams that are still on it.
    """

    def __init__(self, dial: Dial, token: Callable[[], str | None]) -> None:
        self._dial = dial
        self._token = token
        self._channels: list[grpc.aio.Channel] = []
        self._current()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_current(lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_current(lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_current(lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_current(lambda channel: channel.stream_stream(*args, **kwargs))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

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
    """The span of the request being served, so that what a peer does for it belongs to it."""
    parent = tracing.current().traceparent
    if not parent or any(key == tracing.TRACE_PARENT for key, _ in given):
        return ()
    return ((tracing.TRACE_PARENT, parent),)


def _request_id(given: tuple[tuple[str, Any], ...]) -> Metadata:
    """The id of the request being served, so that one id follows a request through all services."""
    current = structlog.contextvars.get_contextvars().get("request_id")
    if current is None or any(key == REQUEST_ID for key, _ in given):
        return ()
    return ((REQUEST_ID, str(current)),)
