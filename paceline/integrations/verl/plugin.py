"""Registration with verl, which imports this by its entry points or by VERL_USE_EXTERNAL_MODULES."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from verl.checkpoint_engine import CheckpointEngine
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from paceline.integrations.verl.settings import BACKEND, FleetSettings, drain, push


class PacelineCheckpointEngine(CheckpointEngine):
    """Checkpoint engine that pushes the weights from the actor's first process to the fleet.

    The processes need no connections between them, so most methods do nothing.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        """Take `rollout.checkpoint_engine.engine_kwargs.paceline`. `bucket_size` has no effect.

        Raises:
            UnsupportedTrainerError: a setting is missing, unknown or wrong.
        """
        self._is_master = is_master
        self._settings = FleetSettings.read(settings, f"rollout.checkpoint_engine.engine_kwargs.{BACKEND}")

    def prepare(self) -> dict[str, Any]:
        """Return no metadata."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no arguments for `init_process_group`."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Do nothing."""

    def finalize(self) -> None:
        """Do nothing."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Push the weights in the first process of the actor; return metrics for verl.

        When this returns in that process, the fleet serves the weights.

        Raises:
            PacelineError: the push was refused; the fleet serves the same version as before.
        """
        if not self._is_master:
            drain(weights)
            return {}
        finished = push(weights, self._settings)
        return {"paceline/policy_version": finished.policy_version}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yield nothing: the fleet gets the weights from the actor itself."""
        none: tuple[tuple[str, Any], ...] = ()
        for each in none:
            yield each


def _replica() -> type[RolloutReplica]:
    from paceline.integrations.verl.server import PacelineReplica

    return PacelineReplica


RolloutReplicaRegistry.register(BACKEND, _replica)
CheckpointEngineRegistry.register(BACKEND)(PacelineCheckpointEngine)
# verl has no function to register this class.
base._ROLLOUT_REGISTRY[BACKEND, "async"] = "paceline.integrations.verl.adapter.PacelineServerAdapter"
