"""The gateway process: a server that is always there, and terms of leadership one after the other."""

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from paceline.internal.v1 import demand_pb2_grpc
from paceline.v1 import fleet_pb2_grpc, rollout_pb2_grpc, weight_pb2_grpc
from services.gateway.config import GatewayConfig
from services.gateway.demand_service import DemandServicer
from services.gateway.drafter import DrafterFront
from services.gateway.fleet_service import FleetServicer
from services.gateway.keys import GatewayKeys
from services.gateway.metrics import GatewayMetrics
from services.gateway.policy import PolicyFront
from services.gateway.rollout_service import RolloutServicer
from services.gateway.term import Term
from services.gateway.weight_service import WeightServicer
from services.platform.leadership import Leadership
from services.platform.server import GrpcServer
from services.platform.store import connect


class Gateway:
    """Usage: `start`, then `run` until it is cancelled, then `stop`. Health says SERVING while it leads."""

    def __init__(self, config: GatewayConfig, registry: CollectorRegistry) -> None:
        self._config = config
        self._metrics = GatewayMetrics(registry)
        self._redis: Redis = connect(config)
        key = GatewayKeys(config.namespace).lease
        self.leadership = Leadership(
            "gateway", self._redis, key, config.lease_seconds, self._open, self._changed
        )
        self.server = GrpcServer(config, service="gateway", registry=registry)
        server, term = self.server.server, self.leadership.leading
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(term, self._metrics), server)
        weight_pb2_grpc.add_WeightServiceServicer_to_server(WeightServicer(term), server)
        demand_pb2_grpc.add_DemandServiceServicer_to_server(DemandServicer(term), server)
        fronts = PolicyFront(config, self._redis), DrafterFront(config, self._redis)
        fleet = FleetServicer(term, *fronts)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)

    @property
    def address(self) -> str:
        """Where trainers find it, once started."""
        return self.server.address

    async def start(self) -> None:
        """Opens the port."""
        await self.server.start()

    async def run(self) -> None:
        """Leads whenever it has the lease, until cancelled."""
        await self.leadership.run()

    async def stop(self, grace: float) -> None:
        """Closes the port."""
        await self.server.stop(grace)
        await self._redis.aclose()

    async def _open(self, token: str) -> Term:
        return await Term.open(self._config, self._redis, token, self._metrics)

    async def _changed(self, leading: bool) -> None:
        self._metrics.leader.set(leading)
        await self.server.set_serving(leading)
