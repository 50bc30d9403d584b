"""The policy process: a registered server, and terms of leadership one after the other."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from paceline.internal.v1 import policy_pb2_grpc as rpc
from services.platform.decisions import Decision, DecisionLog
from services.platform.leadership import Leadership
from services.platform.registered import LEADING, STANDBY, RegisteredServer
from services.platform.registry import Registry
from services.platform.store import Keys
from services.policy.config import PolicyConfig
from services.policy.controller import Controller
from services.policy.metrics import PolicyMetrics
from services.policy.scaling.scaler import Scaler
from services.policy.service import PolicyService
from services.policy.store import KnobStore, lease_key
from services.policy.stored import Calibration

SERVICE = "policy"
"""Name in the registry."""


class PolicyProcess(RegisteredServer):
    """Usage: `start`, then `run` until it is cancelled, then `stop`."""

    def __init__(self, config: PolicyConfig, registry: CollectorRegistry, metrics_port: int = 0) -> None:
        super().__init__(
            config, SERVICE, config.instance_id, metrics_port=metrics_port, registry=registry, state=STANDBY
        )
        self._config = config
        self._metrics = PolicyMetrics(registry)
        self._calibrations = _calibrations(config.calibrations)
        self._decisions = DecisionLog(self.redis, config.namespace)
        key = lease_key(config.namespace)
        self.leadership = Leadership(
            "policy service", self.redis, key, config.lease_seconds, self._open, self._changed
        )
        self.work.append(self.leadership.run)
        if config.scaling.pools:
            self.work.append(Scaler(config, config.scaling, registry, self._tell_decision).run)
        rpc.add_PolicyServiceServicer_to_server(PolicyService(self.leadership.leading), self.server.server)

    async def _open(self, token: str) -> Controller:
        config = self._config
        store = KnobStore(self.redis, config.namespace, token)
        registry = Registry(self.redis, Keys(config.namespace))
        renewed = await store.keep_calibrations(self._calibrations)
        return await Controller.open(config, store, registry, self._decisions, self._metrics, renewed=renewed)

    async def _changed(self, leading: bool) -> None:
        self._metrics.leader.set(leading)
        await self.tell(LEADING if leading else STANDBY)

    async def _tell_decision(self, decision: Decision) -> None:
        # Standbys recommend as well, for their metrics; one of them explains.
        if self.leadership.term is not None:
            await self._decisions.write(decision)


def _calibrations(folder: Path | None) -> dict[str, str]:
    """The calibrations of a folder by file name. UnusableCalibration for a file that is none."""
    if folder is None:
        return {}
    return {path.name: Calibration.load(path).model_dump_json() for path in sorted(folder.glob("*.json"))}
