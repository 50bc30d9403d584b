"""A replica of verl's rollout whose engines are a Paceline fleet. Imports verl and Ray."""

from __future__ import annotations

from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from paceline.integrations.errors import UnsupportedTrainerError
from paceline.integrations.verl.naming import BACKEND, server_name
from paceline.integrations.verl.server import MOST_CALLS, PacelineServer
from paceline.integrations.verl.settings import FleetSettings


class PacelineReplica(RolloutReplica):
    """One door to the fleet: a Ray actor without a GPU. The engines behind it are the fleet's own business.

    So there is nothing to put to sleep or to wake, and no cache to clear: the fleet drops KV of old weights itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of verl's `RolloutReplica`.

        Raises:
            UnsupportedTrainerError: a setting is wrong, or the replica is to serve a reward or teacher model.
        """
        super().__init__(*args, **options)
        if self.is_reward_model or self.is_teacher_model:
            raise UnsupportedTrainerError(
                "rollout.name=paceline serves the policy only: name another for reward and teacher models"
            )
        if self.config.full_determinism:
            raise UnsupportedTrainerError(
                "rollout.full_determinism is not supported: seeds go by order of arrival"
            )
        self.settings = FleetSettings.read(
            self.config.engine_kwargs.get(BACKEND), f"rollout.engine_kwargs.{BACKEND}"
        )

    async def init_standalone(self) -> None:
        """Begin without GPUs of the trainer's: one worker, on a CPU, is told of new weights.

        Raises:
            UnsupportedTrainerError: another checkpoint engine is to bring the weights.
            PacelineError: the fleet cannot be reached.
        """
        backend = self.config.checkpoint_engine.backend
        if backend != BACKEND:
            raise UnsupportedTrainerError(
                f"rollout.checkpoint_engine.backend is {backend}: a fleet gets its weights by {BACKEND} alone"
            )
        await self.init_colocated(
            RayResourcePool(
                [1], use_gpu=False, name_prefix=f"{BACKEND}_{self.replica_rank}", max_colocate_count=1
            )
        )
        self.rollout_mode = RolloutMode.STANDALONE

    def rollout_worker_use_gpu(self) -> bool:
        """Return False."""
        return False

    async def launch_servers(self) -> None:
        """Start the actor and let it connect. PacelineError: the fleet cannot be reached."""
        server: Any = (
            ray.remote(PacelineServer)
            .options(name=server_name(self.replica_rank), num_cpus=0, max_concurrency=MOST_CALLS)
            .remote(self.config, self.settings, self.replica_rank)
        )
        await server.launch.remote()
        self.servers = [server]
        self._server_handle = server
        # verl tells its servers apart by this.
        self._server_address = f"{self.settings.name}/{self.replica_rank}"

    async def wake_up(self) -> None:
        """Do nothing."""

    async def sleep(self) -> None:
        """Do nothing."""

    async def clear_kv_cache(self) -> None:
        """Do nothing."""

    async def release_kv_cache(self) -> None:
        """Do nothing."""

    async def resume_kv_cache(self) -> None:
        """Do nothing."""

    async def start_profile(self, **options: Any) -> None:
        """Do nothing."""

    async def stop_profile(self) -> None:
        """Do nothing."""
