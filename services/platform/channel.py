"""The way to a peer: a channel with this service's TLS, token and limits."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from services.platform.config import ServiceConfig, is_loopback
from services.platform.interceptor import REQUEST_ID
from services.platform.transport import channel_credentials, channel_options

Metadata = tuple[tuple[str, str], ...]


def open_channel(address: str, config: ServiceConfig) -> grpc.aio.Channel:
    """A channel to "host:port"; connects at first use. Its calls carry the token and the request id.

    ValueError when the token would travel in plain text beyond loopback (and `config.insecure` is unset).
    """
    token = config.token.get_secret_value() if config.token is not None else None
    options = channel_options(config)
    if config.tls is not None:
        channel = grpc.aio.secure_channel(address, channel_credentials(config.tls), options)
        return _CallerChannel(channel, token)
    if token is not None and not config.insecure and not is_loopback(address.rpartition(":")[0]):
        raise ValueError(f"will not send the token to {address} in plain text; set tls, or insecure")
    return _CallerChannel(grpc.aio.insecure_channel(address, options), token)


class _CallerChannel(grpc.aio.Channel):
    """Adds metadata to every call.

    A wrapper rather than client interceptors: those put a task and a queue between caller and stream.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self._channel = channel
        self._token: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_stream(*args, **kwargs))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _with_metadata(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            given = tuple(metadata or ())
            return method(*args, metadata=(*given, *self._token, *_request_id(given)), **kwargs)

        return call


def _request_id(given: tuple[tuple[str, Any], ...]) -> Metadata:
    """The id of the request being served, so that one id follows a request through all services."""
    current = structlog.contextvars.get_contextvars().get("request_id")
    if current is None or any(key == REQUEST_ID for key, _ in given):
        return ()
    return ((REQUEST_ID, str(current)),)
