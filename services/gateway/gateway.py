"""The gateway process: a server that is always there, and terms of leadership one after the other."""

import asyncio
import contextlib
import uuid

import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.internal.v1 import demand_pb2_grpc
from paceline.v1 import fleet_pb2_grpc, rollout_pb2_grpc, weight_pb2_grpc
from services.gateway.config import GatewayConfig
from services.gateway.demand_service import DemandServicer
from services.gateway.fleet_service import FleetServicer
from services.gateway.keys import GatewayKeys
from services.gateway.metrics import GatewayMetrics
from services.gateway.policy import PolicyFront
from services.gateway.rollout_service import RolloutServicer
from services.gateway.tasks import end
from services.gateway.term import Term
from services.gateway.weight_service import WeightServicer
from services.platform.errors import Unavailable
from services.platform.lease import Lease
from services.platform.server import GrpcServer
from services.platform.store import connect

log = structlog.get_logger(__name__)

_OPEN_PAUSE = 0.5


class Gateway:
    """Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(self, config: GatewayConfig, registry: CollectorRegistry) -> None:
        self._config = config
        self._metrics = GatewayMetrics(registry)
        self._redis: Redis = connect(config)
        self._term: Term | None = None
        self.server = GrpcServer(config, service="gateway", registry=registry)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(
            RolloutServicer(self.term, self._metrics), self.server.server
        )
        weight_pb2_grpc.add_WeightServiceServicer_to_server(WeightServicer(self.term), self.server.server)
        demand_pb2_grpc.add_DemandServiceServicer_to_server(DemandServicer(self.term), self.server.server)
        fleet = FleetServicer(self.term, PolicyFront(config, self._redis))
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, self.server.server)

    @property
    def address(self) -> str:
        """Where trainers find it, once started."""
        return self.server.address

    def term(self) -> Term:
        """The current term; Unavailable while another gateway leads."""
        if self._term is None:
            raise Unavailable("this gateway stands by for another one", retry_after=1.0)
        return self._term

    async def start(self) -> None:
        """Opens the port; health says NOT_SERVING until the first term begins."""
        await self.server.start()

    async def run(self) -> None:
        """Leads whenever it has the lease, until cancelled."""
        while True:
            # A new token each term, so that nothing left over from an earlier one can write.
            token = uuid.uuid4().hex
            key = GatewayKeys(self._config.namespace).lease
            lease = Lease(self._redis, key, token, self._config.lease_seconds)
            try:
                await lease.acquire()
                await self._lead(lease)
            finally:
                self._term = None
                self._metrics.leader.set(0)
                with contextlib.suppress(RedisError):
                    await lease.release()

    async def stop(self, grace: float) -> None:
        """Closes the port."""
        await self.server.stop(grace)
        await self._redis.aclose()

    async def _lead(self, lease: Lease) -> None:
        holding = asyncio.create_task(lease.hold(), name="lease")
        working = asyncio.create_task(self._work(lease.token), name="term")
        try:
            await asyncio.wait((holding, working), return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                log.warning("lease_lost", to=holding.result())
            else:
                working.result()
        finally:
            self._term = None
            await self.server.set_serving(False)
            await end((working, holding))

    async def _work(self, token: str) -> None:
        term = await self._open(token)
        self._term = term
        self._metrics.leader.set(1)
        log.info("leading", token=token, version=term.book.version)
        await self.server.set_serving(True)
        await term.run()

    async def _open(self, token: str) -> Term:
        while True:
            try:
                return await Term.open(self._config, self._redis, token, self._metrics)
            except RedisError as error:
                log.warning("journal_unreadable", error=str(error))
                await asyncio.sleep(_OPEN_PAUSE)
