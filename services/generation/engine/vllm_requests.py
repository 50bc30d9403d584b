"""Translate samples to vLLM's requests, and vLLM's outputs and errors back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from math import isnan
from pathlib import Path
from typing import Any

import structlog
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

from paceline.errors import Violation
from services.contracts.errors import DataLoss, InvalidArgument, ServiceError
from services.contracts.sampling import ModelLimits, Sampling
from services.generation.engine.grammars import grammars_of
from services.generation.engine.sampling.inputs import (
    CACHED_KEY,
    RECORDED_KEY,
    SETTINGS_KEY,
    CachedRollout,
    RecordedDrafts,
    SampleSettings,
)
from services.generation.engine.sampling.outputs import joined, unpack, unpack_likeliest
from services.generation.engine.text import StopStrings
from services.generation.engine.types import Ending, EngineRequest, Finish, SampleStep

_log = structlog.get_logger(__name__)

WRONG_VALUES = (VLLMValidationError, ValueError, TypeError, ArithmeticError, LookupError)
"""Exceptions for a value that an engine cannot use, as opposed to an engine that cannot continue."""
_PARAMETERS = tuple(each.name for each in fields(Sampling))
_SETTINGS = tuple(each.name for each in fields(SampleSettings))
# vLLM raises any temperature between 0 and this one to it.
_VLLM_COLDEST = 0.01
_FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


class PrefixHits:
    """Tokens that each sample's first scheduling found in the prefix cache.

    vLLM itself counts hits only for requests that begin with their prompt; to vLLM a resumed sample is a preempted
    request.
    """

    def __init__(self, scheduler: Any) -> None:
        """Watch the lookups of this vLLM scheduler in its KV cache manager."""
        manager = scheduler.kv_cache_manager
        self._requests = scheduler.requests
        self._find = manager.get_computed_blocks
        self._hits: dict[str, int] = {}
        manager.get_computed_blocks = self._watched

    def _watched(self, request: Any) -> Any:
        found = self._find(request)
        # The last lookup before a sample runs counts. Samples that arrive with their KV are not queued.
        if request.request_id in self._requests:
            self._hits[request.request_id] = found[1]
        return found

    def give(self, steps: Iterable[SampleStep]) -> None:
        """Set the tokens found in steps of samples that have just run for the first time."""
        if self._hits:
            for step in steps:
                step.cached_context = self._hits.pop(step.sample_id, None)

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Forget samples that may not have run."""
        for sample_id in sample_ids:
            self._hits.pop(sample_id, None)


class VllmRequests:
    """Translator of one engine. Keeps the cached log-probabilities of samples that reuse a cached rollout."""

    def __init__(
        self, limits: ModelLimits, block_hasher: Any, stops: StopStrings, hits: PrefixHits, *, coupled: bool
    ) -> None:
        """Translate for a model with these limits, and vLLM's hasher of KV blocks."""
        self._hits = hits
        self._limits = limits
        self._stops = stops
        self._block_hasher = block_hasher
        self._coupled = coupled
        # Cached log-probabilities that a sample has not reached yet, by id; removed when it leaves its rollout.
        self.cached_logprobs: dict[str, Sequence[float]] = {}
        # Samples that have left their rollouts; the engine reports them to its steps and clears the list.
        self.left_rollouts: list[str] = []

    def request(self, request: EngineRequest) -> Request:
        """Build vLLM's request of a sample; the tokens of its prefix are output."""
        sample = Request(
            request_id=request.sample_id,
            prompt_token_ids=list(request.prompt),
            sampling_params=self._sampling_params(request),
            pooling_params=None,
            block_hasher=self._block_hasher,
        )
        if request.prefix:
            sample.append_output_token_ids(list(request.prefix))
        return sample

    def finished_by_prefix(self, request: EngineRequest) -> Ending | None:
        """Return how the prefix of a sample ends it already; None if it does not."""
        if not request.prefix:
            return None
        if not request.environment_last:
            stop_string = self._stops.ended_by(request.sampling, request.prefix)
            if stop_string or request.prefix[-1] in self._stop_tokens(request.sampling):
                return Ending(Finish.STOP, stop_string)
        return Ending(Finish.LENGTH) if len(request.prefix) >= self._max_tokens(request) else None

    def _sampling_params(self, request: EngineRequest) -> SamplingParams:
        sampling = request.sampling
        stops = self._stop_tokens(sampling)
        return SamplingParams(
            # V2's runner counts tokens for them.
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            max_tokens=self._max_tokens(request),
            stop_token_ids=list(stops),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            skip_clone=True,
            # Tokens found in the prefix cache are not computed, so they have no logits to score.
            skip_reading_prefix_cache=sampling.prompt_logprobs is not None,
            **(self._ours(request, stops) if self._coupled else _vllms(sampling)),
        )

    def _ours(self, request: EngineRequest, stops: tuple[int, ...]) -> dict[str, Any]:
        """Return the parameters that our sampler applies itself, row by row, exactly as requested.

        vLLM gets its defaults for them: it changes temperatures below 0.01 and refuses temperatures above 2, and
        its processors for min_p and min_tokens keep one value per request, which is wrong for the rows of a draft.
        """
        sampling = request.sampling
        settings = SampleSettings(
            seed=request.seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            min_tokens=sampling.min_tokens,
            forbidden=stops if sampling.min_tokens else (),
            allowed=sampling.allowed_token_ids,
            processed_logprobs=sampling.processed_logprobs,
            top_logprobs=sampling.top_logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            json_schema=sampling.json_schema,
            stops=stops if sampling.json_schema else (),
            verifier=request.verifier,
            near_ties=request.near_ties and not sampling.top_logprobs,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
        )
        # `asdict` would copy all values, which takes longer than building the request.
        extra: dict[str, Any] = {SETTINGS_KEY: {name: getattr(settings, name) for name in _SETTINGS}}
        if request.follows:
            extra[CACHED_KEY] = CachedRollout.of(request, self._limits.vocab_size)
        if request.recorded is not None:
            extra[RECORDED_KEY] = RecordedDrafts(request.recorded, request.lenience)
        return {"extra_args": extra}

    def _max_tokens(self, request: EngineRequest) -> int:
        room = self._limits.max_model_len - len(request.prompt)
        return room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)

    def _stop_tokens(self, sampling: Sampling) -> tuple[int, ...]:
        own = sampling.stop_token_ids
        return own if sampling.ignore_eos else tuple(dict.fromkeys((*own, *self._limits.end_tokens)))

    def sample_steps(self, outputs: Sequence[EngineCoreOutput]) -> list[SampleStep]:
        """Translate the outputs of a step, one for each sample."""
        found = [each.new_logprobs for each in outputs]
        logprobs, marks, likeliest = joined([each for each in found if each is not None])
        steps, end = list[SampleStep](), 0
        for output, scores in zip(outputs, found, strict=True):
            begin = end
            if scores is not None:
                end += len(scores.sampled_token_ranks)
            step = SampleStep(output.request_id, output.new_token_ids, logprobs[begin:end])
            if self._coupled and begin < end:
                # Zero without drafts and reused tokens.
                if marks[begin]:
                    step.drafted, step.accepted, step.reused = unpack(marks[begin:end])
                if likeliest:
                    step.top_token_ids, step.top_logprobs = unpack_likeliest(scores)
            if output.finish_reason is not None:
                step.finish = _FINISH.get(output.finish_reason, Finish.ERROR)
            # Our `PromptScores`, in the field of vLLM's tensors.
            step.prompt_scores = output.new_prompt_logprobs_tensors
            steps.append(step)
        self._hits.give(steps)
        if self.cached_logprobs:
            for step in steps:
                if step.sample_id in self.cached_logprobs:
                    self._set_cached_logprobs(step)
        # A NaN makes the sum NaN, so most steps pay only for the sum.
        if isnan(sum(logprobs)):
            for step in steps:
                _cut_at_nan(step)
        return steps

    def _set_cached_logprobs(self, step: SampleStep) -> None:
        """Give reused tokens the log-probabilities with which they were generated."""
        reused, left = step.reused, self.cached_logprobs.pop(step.sample_id)
        step.verified_logprobs = step.logprobs[:reused]
        step.logprobs[:reused] = left[:reused]
        if step.finish is None and reused == len(step.token_ids) and reused < len(left):
            self.cached_logprobs[step.sample_id] = left[reused:]
        else:
            self.left_rollouts.append(step.sample_id)


def _vllms(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters of a sample for vLLM's own sampler.

    Raises:
        ValueError: vLLM would not sample as requested.
    """
    if 0 < sampling.temperature < _VLLM_COLDEST:
        raise ValueError(f"vLLM's own sampler draws temperature {sampling.temperature} at {_VLLM_COLDEST}")
    names = ("temperature", "top_k", "top_p", "min_p", "min_tokens")
    return {name: getattr(sampling, name) for name in names}


def _cut_at_nan(step: SampleStep) -> None:
    """End a sample as an error, before the first token that could not be sampled."""
    keep = next((i for i, value in enumerate(step.logprobs) if isnan(value)), None)
    if keep is None:
        return
    step.finish = Finish.ERROR
    step.cut(keep)


def refused(error: Exception) -> InvalidArgument:
    """Return the refusal of a sample that vLLM did not accept, with the field at fault."""
    message = str(error).strip()
    named = str(getattr(error, "parameter", None) or message.split(maxsplit=1)[0] if message else "")
    field = f"sampling.{named}" if named in _PARAMETERS else "sampling"
    return InvalidArgument([Violation(field, f"the engine refused it: {message or type(error).__name__}")])


def unsampled(folder: Path, limits: ModelLimits, sampling: Sampling, response: Sequence[int]) -> ServiceError:
    """Return why no token could be sampled after a response: its grammar allows none, or the model fails."""
    place = f"at response position {len(response)}"
    if sampling.json_schema and _is_at_a_dead_end(folder, limits, sampling, response):
        fault = f"allows no token of the model's vocabulary {place}"
        return InvalidArgument([Violation("sampling.json_schema", fault)])
    return DataLoss(f"the model gives no finite logits {place}")


def _is_at_a_dead_end(folder: Path, limits: ModelLimits, sampling: Sampling, response: Sequence[int]) -> bool:
    try:
        grammars = grammars_of(folder, limits.vocab_size)
        return grammars.allows_nothing(sampling.json_schema, response, sorted(sampling.stops(limits)))
    except Exception:
        # This runs in the engine's thread for a sample that has failed already: the others must continue.
        _log.exception("grammar_failed")
        return False
