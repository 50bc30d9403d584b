"""Gateway process: a server that always runs, terms of leadership, and calls forwarded to another leader.

Every gateway takes calls, whichever a load balancer chooses: a standby is ready, and forwards them to the leader.
It forwards messages as bytes, one by one, so that flow control works on both sides and nothing is parsed twice. A
call keeps the caller that the standby has authenticated. The standby checks the token, its scopes and its rate; the
leader checks runs and quotas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from paceline.internal.v1 import demand_pb2_grpc
from paceline.transport.channel import CALLER, ON_BEHALF
from paceline.v1 import fleet_pb2_grpc, rollout_pb2_grpc, weight_pb2_grpc
from services.contracts.errors import Unavailable
from services.contracts.gateway_keys import GatewayKeys
from services.gateway.config import GatewayConfig
from services.gateway.instances.connection import received_error
from services.gateway.metrics import GatewayMetrics
from services.gateway.server.fleet_service import WITHOUT_LEADER, DemandServicer, FleetServicer
from services.gateway.server.trainer_services import RolloutServicer, WeightServicer
from services.gateway.term import LeadershipTerm
from services.platform.grpc.channel import open_channel
from services.platform.grpc.interceptor import time_left
from services.platform.grpc.server import GrpcServer, bracketed
from services.platform.observability.event_loop import MeteredLoop, TurnProfiler
from services.platform.redis.connection import connect
from services.platform.redis.leadership import Leader, Leadership
from services.platform.tasks import end

FORWARDED = "x-paceline-forwarded"
"""Metadata key of a forwarded call, which is not forwarded again."""
_SERVICES = "/paceline."
"""Prefix of the methods that a leader serves. Each server answers health and reflection itself."""
_LEAVING_SECONDS = 30.0
"""Longest time that calls to a former leader may continue; it normally ends them earlier."""
# Errors of a call to which nothing more can be written.
_ENDED = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


class Gateway:
    """Server and leadership of one gateway.

    Its health is SERVING while it leads or forwards calls to the leader. A standby is ready while another gateway
    leads and it could succeed it: it reaches Redis, and can read the journal.

    Usage: `start`, then `run` until cancelled, then `stop`.
    """

    def __init__(self, config: GatewayConfig, registry: CollectorRegistry) -> None:
        self._config = config
        self._metrics = GatewayMetrics(registry)
        self._redis: Redis = connect(config)
        self._profiling = ExitStack()
        key = GatewayKeys(config.namespace).lease
        self.forwarder = Forwarder(config)
        self.server = GrpcServer(config, service="gateway", registry=registry, inner=[self.forwarder])
        if self.server.guard is not None:
            self.server.guard.warn_of_shared_runs()
        self.leadership = Leadership(
            *("gateway", config, key, self._open, self._changed),
            unfit=self._unfit_changed,
            followed=self.follow,
            address=self._leader_address,
            check=self._check,
        )
        # Work is paused because too many finished samples wait for Redis.
        self._paused = False
        server, term = self.server.server, self.leadership.leading
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(term, self._metrics), server)
        weight_pb2_grpc.add_WeightServiceServicer_to_server(WeightServicer(term, config.weights_root), server)
        demand_pb2_grpc.add_DemandServiceServicer_to_server(DemandServicer(term), server)
        fleet = FleetServicer(term, config, self._redis)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)

    @property
    def address(self) -> str:
        """Address for trainers, once started."""
        return self.server.address

    async def start(self) -> None:
        """Open the port."""
        await self.server.start()
        await self.server.set_leading(False)
        loop = asyncio.get_running_loop()
        if isinstance(loop, MeteredLoop):
            self._metrics.watch_turns(loop.turns)
            self._profiling.enter_context(TurnProfiler(loop.turns))

    async def run(self) -> None:
        """Lead whenever this gateway has the lease, until cancelled."""
        await self.leadership.run()

    async def stop(self, grace: float) -> None:
        """Close the port."""
        self._profiling.close()
        await self.server.stop(grace)
        await self.forwarder.close()
        await self._redis.aclose()

    async def follow(self, leader: Leader | None) -> None:
        """Forward calls to the gateway that leads; None: answer them here."""
        self.forwarder.follow(leader)
        await self._show()

    async def _show(self) -> None:
        leading = self.leadership.term is not None
        problem = ""
        if not leading:
            # A leader of an older version gives no address. It still hands over once this gateway is ready.
            problem = self.leadership.unfit or ("" if self.forwarder.leader else "no gateway leads")
        await self.server.set_serving(leading or bool(self.forwarder.address), problem)

    async def _open(self, term: int) -> LeadershipTerm:
        return await LeadershipTerm.open(self._config, self._redis, term, self._metrics, self._pause_changed)

    async def _check(self) -> None:
        await LeadershipTerm.check(self._config, self._redis)

    async def _changed(self, leading: bool) -> None:
        self._metrics.leader.set(leading)
        await self.server.set_leading(leading)
        if leading:
            await self.follow(None)
        else:
            await self._show()

    def _leader_address(self) -> str:
        host = self._config.leader_host
        return self.address if host is None else f"{bracketed(host)}:{self.server.port}"

    async def _unfit_changed(self, _: str) -> None:
        await self._show_store()
        await self._show()

    async def _pause_changed(self, paused: bool) -> None:
        self._paused = paused
        await self._show_store()

    async def _show_store(self) -> None:
        await self.server.set_store(not self.leadership.unfit and not self._paused)


class Forwarder(grpc.aio.ServerInterceptor):
    """Interceptor that forwards calls to `leader` while another gateway leads.

    It runs inside the interceptor that authenticates, counts, and turns exceptions into statuses.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = peer_config(config)
        self.leader: Leader | None = None
        """Another gateway that leads, if one is known."""
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Address to which calls are forwarded; empty if this gateway answers them."""
        return "" if self.leader is None else self.leader.address

    def follow(self, leader: Leader | None) -> None:
        """Forward calls to a gateway from now on; with None, or one without an address, answer them here."""
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
        """Return the handler of a call, or one that forwards it."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not self.address or not method.startswith(_SERVICES):
            return handler
        if method in WITHOUT_LEADER or any(
            key == FORWARDED for key, _ in handler_call_details.invocation_metadata or ()
        ):
            return handler
        return self._forwarding(handler, method)

    def _forwarding(self, handler: Handler, method: str) -> Handler:
        sends = "stream" if handler.request_streaming else "unary"
        shape = f"{sends}_{'stream' if handler.response_streaming else 'unary'}"

        async def forward(request: Any, context: Context) -> Any:
            async with self._call(shape, method, request, context) as call:
                return await call

        async def forward_stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._call(shape, method, request, context) as call:
                async for answer in call:
                    yield answer

        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(forward_stream if handler.response_streaming else forward)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def _call(self, shape: str, method: str, request: Any, context: Context) -> AsyncIterator[Any]:
        """Call the leader with a message or a stream of messages; raise its error unchanged."""
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
    """Send messages to a call. If reading one fails, cancel the call and return the error; otherwise return None.

    gRPC could read the iterator itself, but it cancels a call that its server ends before all messages are sent,
    and loses the server's error.
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
    """Return the configuration for calls to other gateways, whose certificates have the advertised name."""
    tls = config.tls
    if tls is None or tls.server_name is not None or config.leader_host is None:
        return config
    named = tls.model_copy(update={"server_name": config.advertise_host})
    return config.model_copy(update={"tls": named})
