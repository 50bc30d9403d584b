"""The learner's process: a server that is always there, and terms of leadership one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.drafter.config import DrafterConfig
from services.drafter.controller import Controller
from services.drafter.keys import DrafterKeys
from services.drafter.messages import FACTORY
from services.drafter.metrics import DrafterMetrics
from services.drafter.service import LearnerService
from services.drafter.training import Training
from services.gateway.tasks import end
from services.platform.errors import Unavailable
from services.platform.lease import Lease
from services.platform.registry import InstanceRecord, Registration
from services.platform.server import GrpcServer
from services.platform.store import OUTAGES, Keys, connect

log = structlog.get_logger(__name__)

SERVICE = "drafter"
"""Name in the registry."""
LEADING, STANDBY = "serving", "standby"
"""States of a record."""
_OPEN_PAUSE = 0.5


class DrafterProcess:
    """Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(
        self,
        config: DrafterConfig,
        registry: CollectorRegistry,
        metrics_port: int = 0,
        factory: str = FACTORY,
    ) -> None:
        """`factory` names what learns, as "module:class"."""
        self._config = config
        self._metrics = DrafterMetrics(registry)
        self._metrics_port = metrics_port
        self._factory = factory
        self._redis: Redis = connect(config)
        self._registration: Registration | None = None
        self._controller: Controller | None = None
        self.server = GrpcServer(config, service=SERVICE, registry=registry)
        rpc.add_LearnerServiceServicer_to_server(LearnerService(self.leading), self.server.server)

    def leading(self) -> Controller:
        """What this process leads with; Unavailable while another one leads."""
        if self._controller is None:
            raise Unavailable("this learner stands by for another one", retry_after=1.0)
        return self._controller

    async def start(self) -> None:
        """Opens the port and registers."""
        await self.server.start()
        record = InstanceRecord(
            service=SERVICE,
            instance_id=self._config.instance_id,
            address=self.server.address,
            metrics_address=f"{self.server.address.rpartition(':')[0]}:{self._metrics_port}",
            state=STANDBY,
        )
        self._registration = Registration(self._redis, Keys(self._config.namespace), record)
        await self._registration.register()
        # A standby is as healthy as the leader.
        await self.server.set_serving(True)

    async def run(self) -> None:
        """Leads whenever it has the lease, until cancelled or superseded under its name."""
        assert self._registration is not None, "it was started"
        tasks = [
            asyncio.create_task(self._registration.run(), name="heartbeat"),
            asyncio.create_task(self._terms(), name="terms"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end(tasks)

    async def stop(self, grace: float) -> None:
        """Leaves the registry and closes the port."""
        await self.server.set_serving(False)
        if self._registration is not None:
            with contextlib.suppress(*OUTAGES):
                await self._registration.deregister()
        await self.server.stop(grace)
        await self._redis.aclose()

    async def _terms(self) -> None:
        while True:
            # A new token each term, so that nothing left over from an earlier one can write.
            token = uuid.uuid4().hex
            key = DrafterKeys(self._config.namespace).lease
            lease = Lease(self._redis, key, token, self._config.lease_seconds)
            try:
                await lease.acquire()
                await self._lead(lease)
            finally:
                await self._step_down()
                with contextlib.suppress(RedisError):
                    await lease.release()

    async def _lead(self, lease: Lease) -> None:
        holding = asyncio.create_task(lease.hold(), name="lease")
        working = asyncio.create_task(self._work(lease.token), name="term")
        try:
            await asyncio.wait((holding, working), return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                log.warning("lease_lost", to=holding.result())
            else:
                self._ended(working)
        finally:
            self._controller = None
            await end((working, holding))

    @staticmethod
    def _ended(working: asyncio.Task[None]) -> None:
        try:
            working.result()
        except Unavailable as error:
            log.warning("fenced", reason=str(error))

    async def _work(self, token: str) -> None:
        controller = await self._open(token)
        self._controller = controller
        self._metrics.leader.set(1)
        await self._tell(LEADING)
        log.info("leading", token=token)
        await controller.run()

    async def _open(self, token: str) -> Controller:
        while True:
            try:
                training = Training(self._config, self._factory)
                return await Controller.open(self._config, self._redis, token, self._metrics, training)
            except RedisError as error:
                log.warning("record_unreadable", error=str(error))
                await asyncio.sleep(_OPEN_PAUSE)

    async def _step_down(self) -> None:
        self._controller = None
        self._metrics.leader.set(0)
        with contextlib.suppress(RedisError):
            await self._tell(STANDBY)

    async def _tell(self, state: str) -> None:
        if self._registration is not None:
            await self._registration.update(state=state)
