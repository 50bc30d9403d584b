"""The learner's process: a registered server, and terms of leadership one after the other."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.drafter.config import DrafterConfig
from services.drafter.controller import Controller
from services.drafter.keys import DrafterKeys
from services.drafter.messages import FACTORY
from services.drafter.metrics import DrafterMetrics
from services.drafter.service import LearnerService
from services.drafter.training import Training
from services.platform.leadership import Leadership
from services.platform.registered import LEADING, STANDBY, RegisteredServer

SERVICE = "drafter"
"""Name in the registry."""


class DrafterProcess(RegisteredServer):
    """Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(
        self,
        config: DrafterConfig,
        registry: CollectorRegistry,
        metrics_port: int = 0,
        factory: str = FACTORY,
    ) -> None:
        """`factory` names what learns, as "module:class"."""
        super().__init__(
            config, SERVICE, config.instance_id, metrics_port=metrics_port, registry=registry, state=STANDBY
        )
        self._config = config
        self._metrics = DrafterMetrics(registry)
        self._factory = factory
        key = DrafterKeys(config.namespace).lease
        self.leadership = Leadership(
            "learner", self.redis, key, config.lease_seconds, self._open, self._changed
        )
        self.work.append(self.leadership.run)
        rpc.add_LearnerServiceServicer_to_server(LearnerService(self.leadership.leading), self.server.server)

    async def _open(self, token: str) -> Controller:
        training = Training(self._config, self._factory)
        return await Controller.open(self._config, self.redis, token, self._metrics, training)

    async def _changed(self, leading: bool) -> None:
        self._metrics.leader.set(leading)
        await self.tell(LEADING if leading else STANDBY)
