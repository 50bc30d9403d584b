"""Part of verl's rollout that runs in the processes of trainers and replicas. Imports verl and Ray."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout

from paceline.integrations import UnsupportedTrainerError
from paceline.integrations.verl.settings import BACKEND, FleetSettings, drain, push, server_name


class PacelineServerAdapter(BaseRollout):
    """Rollout that pushes the trainer's weights to the fleet, and sends their step to the servers.

    In the worker of a standalone replica it sends only the step, because the checkpoint engine pushes there.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1
    ) -> None:
        """Take verl's configuration of the rollout. `replica_rank` is given in a replica's worker only.

        Raises:
            UnsupportedTrainerError: a setting is missing, unknown or wrong.
        """
        # The base class's __init__ is not called: it would load the model's configuration, which only the fleet
        # needs.
        self.config = omega_conf_to_dataclass(config)
        self.model_config = model_config
        self.device_mesh = device_mesh
        self._settings = FleetSettings.read(
            self.config.engine_kwargs.get(BACKEND), f"rollout.engine_kwargs.{BACKEND}"
        )
        rank, size = int(os.environ["RANK"]), self._replica_size()
        self._pushes = replica_rank < 0
        self._is_first = rank == 0
        self.replica_rank = rank // size if self._pushes else replica_rank
        self.is_leader_rank = not self._pushes or rank % size == 0

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the fleet has its own memory."""

    async def release(self) -> None:
        """Do nothing: the fleet has its own memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Push the weights from the trainer's first process, and send their step to the servers.

        Raises:
            UnsupportedTrainerError: the weights are a LoRA adapter, or differences.
            PacelineError: the push was refused; the fleet serves the same version as before.
        """
        if wire_format != "named_tensors":
            raise UnsupportedTrainerError(
                f"the weights come as {wire_format}: only whole tensors are supported"
            )
        if peft_config is not None:
            raise UnsupportedTrainerError(
                "LoRA adapters must be merged: set actor_rollout_ref.model.lora.merge"
            )
        if self._pushes and self._is_first:
            push(weights, self._settings)
        elif self._pushes:
            drain(weights)
        if self.is_leader_rank and global_steps is not None:
            await ray.get_actor(server_name(self.replica_rank)).set_global_steps.remote(global_steps)

    def _replica_size(self) -> int:
        config = self.config
        size: int = (
            config.tensor_model_parallel_size
            * config.data_parallel_size
            * config.pipeline_model_parallel_size
        )
        return size
