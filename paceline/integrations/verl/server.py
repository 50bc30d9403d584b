"""Replica of verl's rollout, and its Ray actor, from which verl's clients request samples. Imports verl and Ray."""

from __future__ import annotations

from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from paceline import types as t
from paceline.integrations import RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.verl.requests import RolloutDefaults, SampleQueue, wants_logprobs
from paceline.integrations.verl.settings import BACKEND, FleetSettings, server_name

MOST_CALLS = 100_000
"""Concurrent calls of a server; large, so that an abort never queues behind the samples that it must end."""


class PacelineServer:
    """Replacement for verl's inference server: all replicas generate on one fleet."""

    def __init__(self, config: Any, settings: FleetSettings, replica_rank: int) -> None:
        """Take verl's `RolloutConfig`. `launch` connects."""
        self._defaults = RolloutDefaults.read(config)
        self._settings = settings
        self._rank = replica_rank
        self._seed = f"{config.seed}.{replica_rank}"
        self._global_steps: int | None = None
        self._queue: SampleQueue | None = None

    async def launch(self) -> int:
        """Connect to the fleet and return its policy version. PacelineError: it cannot be reached."""
        client = self._settings.async_client()
        self._queue = SampleQueue(client, self._settings.run_id, self._seed)
        return await client.shards.version()

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Generate one response: its tokens, and their log-probabilities if `sampling_params` requests them.

        It waits for the end of a pause. An aborted response has its tokens so far.

        Raises:
            UnsupportedTrainerError: the request needs something that the fleet does not support.
            RolloutFailedError: the sample failed.
            PacelineError: the call was refused.
        """
        if image_data or video_data or audio_data:
            raise UnsupportedTrainerError("prompts with images, video or audio are not supported, only text")
        if priority:
            raise UnsupportedTrainerError("priority of single requests is not supported")
        prompt = [int(token) for token in normalize_token_ids(prompt_ids)]
        sampling = self._defaults.sampling(sampling_params, len(prompt))
        step = self._global_steps
        sample = await self._running().sample(prompt, sampling)
        return _output(sample, wants_logprobs(sampling_params), step)

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the trainer's step of the fleet's present weights."""
        self._global_steps = self._running().step = global_steps
        self._running().forecasts = self._settings.hints and self._is_alone()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort all samples, and let later ones wait, or with `reject_request` answer them as aborted.

        Returns when all samples have ended.
        """
        return {"aborted_count": await self._running().pause(rejects=reject_request)}

    async def resume_generation(self) -> None:
        """End the pause."""
        self._running().resume()

    def _is_alone(self) -> bool:
        """Return True if no other replica has a server; with several, each gets only a part of a step."""
        try:
            ray.get_actor(server_name(1 if self._rank == 0 else 0))
        except ValueError:
            return True
        return False

    def _running(self) -> SampleQueue:
        if self._queue is None:
            raise RuntimeError("the server is not launched")
        return self._queue


def _output(sample: t.Sample | None, logprobs: bool, step: int | None) -> TokenOutput:
    """Return a sample in verl's form; None is a sample that was not begun."""
    if sample is None:
        return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=_extras(t.Provenance(), step))
    if sample.status is t.SampleStatus.FAILED:
        raise RolloutFailedError(f"a sample failed: {sample.error}")
    return TokenOutput(
        token_ids=sample.token_ids.tolist(),
        log_probs=sample.logprobs.tolist() if logprobs else None,
        stop_reason="aborted" if sample.status is t.SampleStatus.ABORTED else "completed",
        extra_fields=_extras(sample.provenance, step),
    )


def _extras(provenance: t.Provenance, step: int | None) -> dict[str, Any]:
    """Return verl's extra fields of a sample: the step of the weights, and counts of speculation."""
    return {
        "global_steps": step,
        "spec_num_draft_tokens": provenance.drafted,
        "spec_num_accepted_tokens": provenance.accepted,
        "spec_num_verify_steps": provenance.verify_steps,
    }


class PacelineReplica(RolloutReplica):
    """Replica that connects to the fleet: a Ray actor without a GPU or an engine.

    So there is nothing to put to sleep or to wake, and no cache to clear: the fleet drops KV of old weights itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of verl's `RolloutReplica`.

        Raises:
            UnsupportedTrainerError: a setting is wrong, or the replica is for a reward or teacher model.
        """
        super().__init__(*args, **options)
        if self.is_reward_model or self.is_teacher_model:
            raise UnsupportedTrainerError(
                "rollout.name=paceline serves the policy only: name another for reward and teacher models"
            )
        if self.config.full_determinism:
            raise UnsupportedTrainerError(
                "rollout.full_determinism is not supported: seeds depend on the order of arrival"
            )
        self.settings = FleetSettings.read(
            self.config.engine_kwargs.get(BACKEND), f"rollout.engine_kwargs.{BACKEND}"
        )

    async def init_standalone(self) -> None:
        """Start without GPUs of the trainer: one worker, on a CPU, is notified of new weights.

        Raises:
            UnsupportedTrainerError: another checkpoint engine is configured.
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
        # verl distinguishes its servers by this address.
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
