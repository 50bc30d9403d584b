"""Process of the learner: a registered server with its gRPC service, and the controller while it leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from paceline.times import timestamp
from services.contracts.drafter.keys import DrafterKeys
from services.contracts.drafter.record import read_history
from services.drafter.config import DrafterConfig
from services.drafter.controller import LearnerController
from services.drafter.metrics import DrafterMetrics
from services.drafter.training.process import LEARNER
from services.platform.redis.decision_log import DecisionLog
from services.platform.registered_server import LeadingServer

SERVICE = "drafter"
"""Name in the registry."""
Context = grpc.aio.ServicerContext[Any, Any]


class LearnerService(rpc.LearnerServiceServicer):
    """Serves the learner. `leading` returns the controller, or raises Unavailable while another process leads."""

    def __init__(self, leading: Callable[[], LearnerController]) -> None:
        self._leading = leading

    async def GetLearner(self, request: pb.GetLearnerRequest, context: Context) -> pb.GetLearnerResponse:
        """Return the progress of training, and the published drafter."""
        controller = self._leading()
        manifest, current = controller.session.manifest, controller.publisher.published
        compared = controller.publisher.compared
        response = pb.GetLearnerResponse(
            policy_version=manifest.policy_version,
            updates=manifest.updates,
            samples_used=manifest.samples_used,
            tokens_used=manifest.tokens_used,
            kd_loss=manifest.kd_loss,
            rejected_candidates=manifest.rejected,
            rollbacks=manifest.rollbacks,
        )
        if compared is not None:
            response.candidate_acceptance_length = compared.candidate
            response.current_acceptance_length = compared.current or 0.0
        if current is not None:
            response.drafter_version, response.path, response.sha256 = (
                current.version,
                current.path,
                current.sha256,
            )
            response.published_at.CopyFrom(timestamp(current.at))
        return response

    async def RollBack(self, request: pb.RollBackRequest, context: Context) -> pb.RollBackResponse:
        """Publish the drafter before the current one."""
        published = await self._leading().publisher.roll_back(request.reason, request.drafter_version)
        return pb.RollBackResponse(drafter_version=published.version)


class DrafterProcess(LeadingServer[LearnerController]):
    """Composition root of the service. Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(
        self,
        config: DrafterConfig,
        registry: CollectorRegistry,
        metrics_port: int = 0,
        learner: str = LEARNER,
    ) -> None:
        """Build the process. `learner` names the class that learns, as "module:class"."""
        self._config = config
        self._metrics = DrafterMetrics(registry)
        self._learner = learner
        super().__init__(
            config,
            SERVICE,
            config.instance_id,
            title="learner",
            lease=DrafterKeys(config.namespace).lease,
            open_term=self._open,
            leader=self._metrics.leader,
            registry=registry,
            metrics_port=metrics_port,
        )
        self._decisions = DecisionLog(self.redis, config.namespace)
        self.work.append(self._decisions.run)
        rpc.add_LearnerServiceServicer_to_server(LearnerService(self.leadership.leading), self.server.server)

    async def _open(self, term: int) -> LearnerController:
        """Read what former leaders published, and begin a term. Raises what Redis raises."""
        history = await read_history(self.redis, self._config.namespace)
        return LearnerController(
            self._config, self.redis, term, self._decisions, self._metrics, self._learner, history
        )
