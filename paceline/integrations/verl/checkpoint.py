"""A checkpoint engine of verl that brings the actor's weights to the fleet. Imports verl."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from verl.checkpoint_engine import CheckpointEngine

from paceline.integrations.verl.settings import BACKEND, FleetSettings, drain, push


class PacelineCheckpointEngine(CheckpointEngine):
    """Pushes the weights from the actor's first process. There is nothing between the processes to set up."""

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        """Take `rollout.checkpoint_engine.engine_kwargs.paceline`. `bucket_size` has no effect.

        Raises:
            UnsupportedTrainerError: a setting is missing, unknown or wrong.
        """
        self._is_master = is_master
        self._settings = FleetSettings.read(settings, f"rollout.checkpoint_engine.engine_kwargs.{BACKEND}")

    def prepare(self) -> dict[str, Any]:
        """Return nothing that others need."""
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
        """Push the weights, in the first process of the actor; return what verl logs of it.

        When this returns there, the fleet serves them.

        Raises:
            PacelineError: the push was refused; the fleet serves what it served.
        """
        if not self._is_master:
            drain(weights)
            return {}
        finished = push(weights, self._settings)
        return {"paceline/policy_version": finished.policy_version}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Iterate over nothing: the fleet has the weights from the actor itself."""
        none: tuple[tuple[str, Any], ...] = ()
        for each in none:
            yield each
