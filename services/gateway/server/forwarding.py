"""Calls that reach a standby: it passes them on to the gateway that leads.

So every gateway takes calls, whichever a load balancer chooses, and a standby is ready. Messages are passed on as
bytes, one by one, so that neither side's flow control is lost and nothing is parsed twice. A call passes on the
caller that the standby has authenticated, as the HTTP facade does; the leader checks runs and quotas, the standby
the token, its scopes and its rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc

from paceline.channel import CALLER, ON_BEHALF
from services.contracts.errors import Unavailable
from services.gateway.config import GatewayConfig
from services.gateway.connections.connection import received_error
from services.gateway.server.fleet_service import WITHOUT_LEADER
from services.platform.grpc.channel import open_channel
from services.platform.grpc.interceptor import time_left
from services.platform.redis.leadership import Leader
from services.platform.tasks import end

FORWARDED = "x-paceline-forwarded"
"""Metadata key of a call that was passed on already: it is not passed on again."""
_SERVICES = "/paceline."
"""How the methods begin that a leader serves; health and reflection are each server's own."""
_LEAVING_SECONDS = 30.0
"""Longest time that calls to a former leader go on; it ends them itself before."""
# What a call raises to which nothing more can be written.
_ENDED = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class Forwarder(grpc.aio.ServerInterceptor):
    """Interceptor of a gateway that passes calls on to `leader`, while there is one and it is another.

    It comes after the interceptor that authenticates, counts and turns exceptions into statuses.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = peer_config(config)
        self.leader: Leader | None = None
        """Another gateway that leads, as far as is known."""
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Address that calls are passed on to; empty if this gateway answers them."""
        return "" if self.leader is None else self.leader.address

    def follow(self, leader: Leader | None) -> None:
        """Pass calls on to a gateway from now on; with None, or one without an address, answer them here."""
        before, self.leader = self.address, leader
        if before == self.address:
            return
        channel, self._channel = self._channel, None
        if channel is not None:
            closing = asyncio.create_task(channel.close(_LEAVING_SECONDS))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all connections to leaders."""
        self.follow(None)
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the handler of a call, or one that passes it on."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not self.address or not method.startswith(_SERVICES):
            return handler
        if method in WITHOUT_LEADER or any(
            key == FORWARDED for key, _ in handler_call_details.invocation_metadata or ()
        ):
            return handler
        return self._passing_on(handler, method)

    def _passing_on(self, handler: Handler, method: str) -> Handler:
        sends = "stream" if handler.request_streaming else "unary"
        shape = f"{sends}_{'stream' if handler.response_streaming else 'unary'}"

        async def answered(request: Any, context: Context) -> Any:
            async with self._call(shape, method, request, context) as call:
                return await call

        async def streamed(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._call(shape, method, request, context) as call:
                async for answer in call:
                    yield answer

        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(streamed if handler.response_streaming else answered)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def _call(self, shape: str, method: str, request: Any, context: Context) -> AsyncIterator[Any]:
        """Call the leader with a message, or with those of a stream; its error is raised as it came."""
        on_behalf = ON_BEHALF.get()
        metadata = ((FORWARDED, "1"), *(((CALLER, on_behalf),) if on_behalf else ()))
        begin = getattr(self._dialled(), shape)(method)
        streams = shape.startswith("stream")
        call = begin(None if streams else request, metadata=metadata, timeout=time_left(context))
        sending = asyncio.create_task(send(request, call)) if streams else None
        try:
            yield call
        except grpc.aio.AioRpcError as error:
            raise received_error(error) from error
        except asyncio.CancelledError:
            if sending is not None and sending.done() and (refusal := sending.result()) is not None:
                raise refusal from None
            raise
        finally:
            call.cancel()
            await end([] if sending is None else [sending])

    def _dialled(self) -> grpc.aio.Channel:
        if not self.address:
            raise Unavailable("the leader is gone", retry_after=1.0)
        if self._channel is None:
            try:
                self._channel = open_channel(self.address, self._config)
            except (OSError, ValueError) as error:
                raise Unavailable(f"the leading gateway cannot be called: {error}") from error
        return self._channel


async def send(messages: AsyncIterator[bytes], call: Any) -> Exception | None:
    """Pass messages on to a call. Return why one of them was refused, which cancels the call; else None.

    Not by gRPC's own reader of an iterator, which cancels a call that its server has ended before all was sent, and
    loses the server's error.
    """
    try:
        async for message in messages:
            try:
                await call.write(message)
            except _ENDED:
                return None
    except Exception as error:
        call.cancel()
        return error
    with suppress(*_ENDED):
        await call.done_writing()
    return None


def peer_config(config: GatewayConfig) -> GatewayConfig:
    """Return the configuration for calls to other gateways, whose certificates have the name that all advertise."""
    tls = config.tls
    if tls is None or tls.server_name is not None or config.leader_host is None:
        return config
    named = tls.model_copy(update={"server_name": config.advertise_host})
    return config.model_copy(update={"tls": named})
