"""The Ray actor that verl's clients ask for samples. Imports verl."""

from __future__ import annotations

from typing import Any

import ray
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import TokenOutput

from paceline import types as t
from paceline.integrations.errors import RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.verl.naming import server_name
from paceline.integrations.verl.requests import SampleQueue
from paceline.integrations.verl.sampling import RolloutDefaults, wants_logprobs
from paceline.integrations.verl.settings import FleetSettings

MOST_CALLS = 100_000
"""Calls at once of a server, so that an abort never waits behind the samples that it is to end."""


class PacelineServer:
    """Stands where verl has an inference server: all replicas generate on one fleet."""

    def __init__(self, config: Any, settings: FleetSettings, replica_rank: int) -> None:
        """Take verl's `RolloutConfig`. `launch` connects."""
        self._defaults = RolloutDefaults.read(config)
        self._settings = settings
        self._rank = replica_rank
        self._seed = f"{config.seed}.{replica_rank}"
        self._global_steps: int | None = None
        self._queue: SampleQueue | None = None

    async def launch(self) -> int:
        """Connect to the fleet and return the version that it serves. PacelineError: it cannot be reached."""
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
        """Generate one response: its tokens, and their log-probabilities where `sampling_params` asks for them.

        It waits for the end of a pause. The tokens of an aborted one are those that it had.

        Raises:
            UnsupportedTrainerError: the request wants what the fleet cannot do.
            RolloutFailedError: the sample could not be had.
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
        """Set the trainer's step that the fleet's weights are of."""
        self._global_steps = self._running().step = global_steps
        self._running().forecasts = self._settings.hints and self._is_alone()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all samples where they are, and let later ones wait, or with `reject_request` answer them aborted.

        Returns once none of them runs any more.
        """
        return {"aborted_count": await self._running().pause(sends_away=reject_request)}

    async def resume_generation(self) -> None:
        """End the pause."""
        self._running().resume()

    def _is_alone(self) -> bool:
        """Return True if no other replica has a server: of several, each has a part of a step."""
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
    """Return a sample as verl has it; None is one that was not begun."""
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
    """Return what verl has beside the tokens: the step of the weights, and counts of speculation."""
    return {
        "global_steps": step,
        "spec_num_draft_tokens": provenance.drafted,
        "spec_num_accepted_tokens": provenance.accepted,
        "spec_num_verify_steps": provenance.verify_steps,
    }
