"""Registration with verl, which imports this by its entry points, or by VERL_USE_EXTERNAL_MODULES."""

from __future__ import annotations

from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from paceline.integrations.verl.checkpoint import PacelineCheckpointEngine
from paceline.integrations.verl.settings import BACKEND


def _replica() -> type[RolloutReplica]:
    from paceline.integrations.verl.server import PacelineReplica

    return PacelineReplica


RolloutReplicaRegistry.register(BACKEND, _replica)
CheckpointEngineRegistry.register(BACKEND)(PacelineCheckpointEngine)
# verl has no call for this one.
base._ROLLOUT_REGISTRY[BACKEND, "async"] = "paceline.integrations.verl.adapter.PacelineServerAdapter"
