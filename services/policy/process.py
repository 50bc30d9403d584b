"""Process of the policy service: a registered server with its servicer, and the knob controller while it leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from paceline.knobs import knobs_to_proto
from services.contracts.errors import Unavailable
from services.contracts.knob_messages import setting_of
from services.contracts.knob_store import KnobStore, lease_key
from services.contracts.knobs import KnobScope
from services.platform.redis.connection import OUTAGES, Keys
from services.platform.redis.decision_log import DecisionLog, DecisionRecord
from services.platform.redis.registry import Registry
from services.platform.registered_server import LeadingServer
from services.policy.config import PolicyConfig
from services.policy.controller import KnobController
from services.policy.in_force import KnobsInForce
from services.policy.metrics import PolicyMetrics
from services.policy.scaling.scaler import Scaler

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = "policy"
"""Name in the registry."""


class PolicyService(rpc.PolicyServiceServicer):
    """Serves the knobs. `leading` returns the controller, or raises Unavailable while another process leads."""

    def __init__(self, leading: Callable[[], KnobController]) -> None:
        self._leading = leading

    async def GetKnobs(self, request: pb.GetKnobsRequest, context: Context) -> pb.GetKnobsResponse:
        """Return the setting of a scope itself, the cap of a run's ladder, and what instances use."""
        controller = self._leading()
        scope = KnobScope.of_request(request.run_id, request.model, request.pool)
        stored = controller.knobs.setting(scope)
        used, pending = controller.links.used(scope)
        rung = controller.knobs.records.rungs.get(request.run_id) if request.run_id else None
        return pb.GetKnobsResponse(
            revision=stored.revision,
            knobs=knobs_to_proto(stored.knobs),
            ladder_cap=rung.cap if rung is not None else 0,
            effective=used,
            pending_instance_ids=pending,
        )

    async def SetKnobs(self, request: pb.SetKnobsRequest, context: Context) -> pb.SetKnobsResponse:
        """Store a setting and send it to the instances that can be reached before answering."""
        controller = self._leading()
        scope = KnobScope.of_request(request.run_id, request.model, request.pool)
        try:
            revision, applied, pending = await controller.set(
                scope, request.revision, setting_of(request.knobs)
            )
        except OUTAGES as error:
            raise Unavailable(f"the knobs could not be stored: {error}") from error
        return pb.SetKnobsResponse(revision=revision, applied=applied, pending=pending)


class PolicyProcess(LeadingServer[KnobController]):
    """Composition root of the service. Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(self, config: PolicyConfig, registry: CollectorRegistry, metrics_port: int = 0) -> None:
        self._config = config
        self._metrics = PolicyMetrics(registry)
        super().__init__(
            config,
            SERVICE,
            config.instance_id,
            title="policy service",
            lease=lease_key(config.namespace),
            open_term=self._open,
            leader=self._metrics.leader,
            registry=registry,
            metrics_port=metrics_port,
        )
        self._decisions = DecisionLog(self.redis, config.namespace)
        self.work.append(self._decisions.run)
        if config.scaling.pools:
            self.work.append(Scaler(config, config.scaling, registry, self._explain).run)
        rpc.add_PolicyServiceServicer_to_server(PolicyService(self.leadership.leading), self.server.server)

    async def _open(self, term: int) -> KnobController:
        store = KnobStore(self.redis, self._config.namespace, term)
        knobs = await KnobsInForce.load(store, self._metrics)
        registry = Registry(self.redis, Keys(self._config.namespace))
        return KnobController(self._config, knobs, registry, self._decisions, self._metrics)

    async def _explain(self, decision: DecisionRecord) -> None:
        # Standbys recommend as well, for their metrics; the leader alone explains.
        if self.leadership.term is not None:
            await self._decisions.write(decision)
