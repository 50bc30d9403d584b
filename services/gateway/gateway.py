"""Gateway process: a server that is always there, and terms of leadership one after the other."""

import asyncio
from contextlib import ExitStack

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from paceline.internal.v1 import demand_pb2_grpc
from paceline.v1 import fleet_pb2_grpc, rollout_pb2_grpc, weight_pb2_grpc
from services.contracts.gateway_keys import GatewayKeys
from services.gateway.config import GatewayConfig
from services.gateway.metrics import GatewayMetrics
from services.gateway.server.fleet_service import DemandServicer, FleetServicer
from services.gateway.server.forwarding import Forwarder
from services.gateway.server.trainer_services import RolloutServicer, WeightServicer
from services.gateway.term import LeadershipTerm
from services.platform.grpc.server import GrpcServer, bracketed
from services.platform.observability.metered_loop import MeteredLoop
from services.platform.observability.turn_profiler import TurnProfiler
from services.platform.redis.connection import connect
from services.platform.redis.leadership import Leader, Leadership


class Gateway:
    """Server and leadership of one gateway.

    Its health is SERVING while it leads or passes calls on to the leader. It is ready while any gateway leads.

    Usage: `start`, then `run` until it is cancelled, then `stop`.
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
            store=self._store_changed,
            followed=self.follow,
            address=self._leader_address,
        )
        # Redis takes writes; so many finished samples wait for it that work has stopped.
        self._usable, self._paused = True, False
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
        """Lead whenever it has the lease, until cancelled."""
        await self.leadership.run()

    async def stop(self, grace: float) -> None:
        """Close the port."""
        self._profiling.close()
        await self.server.stop(grace)
        await self.forwarder.close()
        await self._redis.aclose()

    async def follow(self, leader: Leader | None) -> None:
        """Pass calls on to the gateway that leads; None: to nobody."""
        self.forwarder.follow(leader)
        await self._show()

    async def _show(self) -> None:
        leading = self.leadership.term is not None
        # A leader of an older version gives no address. It makes way all the same once this gateway is ready.
        ready = leading or self.forwarder.leader is not None
        await self.server.set_serving(leading or bool(self.forwarder.address), ready)

    async def _open(self, term: int) -> LeadershipTerm:
        return await LeadershipTerm.open(self._config, self._redis, term, self._metrics, self._pause_changed)

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

    async def _store_changed(self, usable: bool) -> None:
        self._usable = usable
        await self.server.set_store(self._usable and not self._paused)

    async def _pause_changed(self, paused: bool) -> None:
        self._paused = paused
        await self.server.set_store(self._usable and not self._paused)
