"""The engine: vLLM's engine core in this process, stepped by the caller.

    engine = Engine(EngineOptions(model="/models/policy"))
    engine.add(SampleRequest("s-1", prompt, prefix=(), sampling=sampling, seed=seed))
    while engine.has_work:
        for step in engine.step():
            ...

Not safe for threads: one thread builds it and calls it. One engine a process (vLLM keeps global state).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from math import isnan
from typing import Any

import torch

# Read by vLLM when it is imported. Without multiprocessing the executor is in this process too; the V2 model
# runner has other hooks than the ones we use.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request, RequestStatus

from services.generation.engine.arguments import end_tokens, engine_args
from services.generation.engine.marks import unpack
from services.generation.engine.migration import EngineMigration
from services.generation.engine.model_drafts import ModelDrafts
from services.generation.engine.noise import CACHED_KEY, NOISE_KEY, CachedRollout, SampleNoise
from services.generation.engine.types import (
    EAGLE3,
    SELF_W4,
    EngineLoad,
    EngineOptions,
    Finish,
    SampleRequest,
    SampleState,
    SampleStep,
)
from services.platform.sampling import ModelLimits, Sampling

_FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}
# Memory for the float32 logits of one step's drafts, in bytes: vLLM only reserves a row for each sample.
_LOGITS_BYTES = 1 << 30


class StaleKVError(RuntimeError):
    """KV of the old weights could not be dropped; the engine must not serve."""


class Engine:
    """A vLLM engine core and the samples in it.

    Raises at construction what vLLM raises for a model or a device it cannot use. An exception out of `step`
    leaves vLLM returning nothing for ever: the caller hands over what it has and ends the process.
    """

    def __init__(self, options: EngineOptions) -> None:
        _refuse_early_numba()
        config = engine_args(options).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._scheduler: Any = self._core.scheduler
        # Samples that leave for another engine, or come from one.
        self.migration = EngineMigration(self._core, self._request, options.coupled)
        self._drafted: list[str] = []
        # By sample, the cached log-probabilities that it has not come to; none once it takes over nothing more.
        self._cached_logprobs: dict[str, Sequence[float]] = {}
        # The drafters that have a model of their own, by name; those whose tokens cost less come first.
        self.model_drafts = {
            name: ModelDrafts(self._core, name, own.most_tokens)
            for name, own in ((EAGLE3, options.eagle3), (SELF_W4, options.self_w4))
            if own is not None
        }
        self._coupled = options.coupled
        self._sleep_mode = options.sleep_mode
        # Weights of drafters that came while the device was left, by name.
        self._swaps: dict[str, Mapping[str, torch.Tensor]] = {}
        self.asleep = False
        self._eos = end_tokens(config.model_config)
        self.limits = ModelLimits(
            vocab_size=config.model_config.get_vocab_size(), max_model_len=config.model_config.max_model_len
        )
        self.device = current_platform.device_name
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        if options.coupled:
            from kernels.coupled_sampler.cpu import warm_up

            warm_up()

    # -- samples ------------------------------------------------------------------------------------------

    def add(self, request: SampleRequest) -> None:
        """Queue a sample. Its tokens, prompt and lengths must have been checked (`services.platform.sampling`).

        Wakes the engine.

        Raises:
            ValueError: a cached rollout with tokens that the model does not have, or without a log-probability
                for each.
        """
        self.wake()
        sample = self._request(request)
        if request.prefix:
            self._adopt(sample, request)
        self._core.add_request(sample)
        if request.follows:
            self._cached_logprobs[request.sample_id] = request.cached_logprobs

    def finished_by_prefix(self, request: SampleRequest) -> Finish | None:
        """Whether the tokens that a sample brings along end it already, and how."""
        if not request.prefix:
            return None
        if request.prefix[-1] in self._stop_tokens(request.sampling):
            return Finish.STOP
        return Finish.LENGTH if len(request.prefix) >= self._max_tokens(request) else None

    def abort(self, sample_ids: Iterable[str]) -> None:
        """End samples now and free their KV. Unknown ones are passed over."""
        ended = list(sample_ids)
        self._core.abort_requests(ended)
        for sample_id in ended:
            self._cached_logprobs.pop(sample_id, None)
            self.migration.forget(sample_id)

    def step(self) -> list[SampleStep]:
        """Run one engine step: schedule, forward, verify, sample."""
        outputs, executed = self._core.step()
        if not self._coupled:
            self._core.post_step(executed)
        found = [self._sample_step(output) for batch in outputs.values() for output in batch.outputs]
        self._take_back_drafts()
        broken = [step.sample_id for step in found if step.finish is Finish.ERROR]
        if broken:
            self.abort(broken)
        return found

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.has_requests())

    @property
    def load(self) -> EngineLoad:
        """Samples and KV blocks right now."""
        scheduler = self._scheduler
        return EngineLoad(
            len(scheduler.running), len(scheduler.waiting), float(scheduler.kv_cache_manager.usage)
        )

    # -- drafts -------------------------------------------------------------------------------------------

    def decoding(self) -> list[SampleState]:
        """Running samples that can verify a draft in the next step."""
        most, states = self.limits.max_model_len, []
        # Not by the requests' properties: this is for every sample of every step.
        for request in self._scheduler.running:
            length = len(request._all_token_ids)
            if request.num_computed_tokens == length - 1:
                response = request._output_token_ids
                room = min(request.max_tokens - len(response), most - length) - 1
                states.append(SampleState(request.request_id, request.prompt_token_ids, response, room))
        return states

    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Set the draft tokens that the next step verifies. Ids must be in the vocabulary."""
        requests = self._scheduler.requests
        for sample_id, tokens in drafts.items():
            requests[sample_id].spec_token_ids = list(tokens)
            self._drafted.append(sample_id)

    def swap_drafter(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a drafter with a model of its own other weights, which were checked; samples go on.

        An engine that has left the device does that when it wakes. A load that fails leaves it without the drafter.
        """
        if self.asleep and self._sleep_mode:
            self._swaps[name] = tensors
        else:
            self.model_drafts[name].swap(tensors)

    @property
    def row_capacity(self) -> int:
        """Most rows that one step should have: samples and draft tokens together.

        vLLM schedules no more tokens than its budget, and cuts drafts that are beyond it.
        """
        return min(self._scheduler.max_num_scheduled_tokens, _LOGITS_BYTES // (4 * self.limits.vocab_size))

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV there is room for."""
        space = self.migration.space
        return space.total_blocks * space.block_size

    @property
    def prompt_rows(self) -> int:
        """Rows of the next step that drafts should leave to prompts: at most half of them.

        vLLM gives rows to samples in the order in which they came, and then to those that wait for a place it has.
        Drafts that take all of them would keep prompts from being read for as long as those samples run.
        """
        scheduler, most = self._scheduler, self.row_capacity // 2
        places = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
        rows = 0
        for request in chain(scheduler.running, islice(scheduler.waiting, places)):
            # Of its own a sample that decodes has one.
            rows += request.num_tokens - request.num_computed_tokens - 1
            if rows >= most:
                return most
        return rows

    # -- weights ------------------------------------------------------------------------------------------

    def apply_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Load weights in place and drop every KV block of the old ones; the number of blocks dropped.

        Args:
            tensors: (checkpoint name, tensor) pairs, complete and checked: a failed load leaves vLLM unusable.

        Raises:
            StaleKVError: KV of the old weights is still referenced.
        """
        self.wake()
        cached = self._cached_blocks()
        for drafts in self.model_drafts.values():
            drafts.forget()
        self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
        self.forget_kv()
        for drafts in self.model_drafts.values():
            drafts.begin()
        return cached

    def forget_kv(self) -> None:
        """Drop every KV block, and the reservations of samples that are to come.

        Raises:
            StaleKVError: a sample still holds some.
        """
        self.migration.withdraw_all()
        if not self._core.reset_prefix_cache():
            raise StaleKVError("vLLM refused to reset its prefix cache: KV blocks are still in use")
        pool = self._scheduler.kv_cache_manager.block_pool
        # One block is vLLM's null block, which is never free.
        if self._cached_blocks() or pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            raise StaleKVError("KV blocks survived the reset")

    # -- sleep --------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Leave the device to others: drop all KV and, with `sleep_mode`, move the weights to host memory.

        The engine must be empty. The next sample wakes it, and so do new weights.
        """
        if self.asleep:
            return
        if self.load.running or self.load.waiting:
            raise RuntimeError("an engine with samples in it cannot sleep")
        if self.has_work:
            # The worker has yet to be told of samples that were ended since the last step.
            self.step()
        self.forget_kv()
        if self._sleep_mode:
            for drafts in self.model_drafts.values():
                drafts.forget(drop=True)
            self._core.sleep(level=1)
        self.asleep = True

    def wake(self) -> None:
        """Take the device back, if the engine sleeps."""
        if not self.asleep:
            return
        if self._sleep_mode and not self._core.wake_up():
            raise RuntimeError("vLLM did not get all of its memory back")
        self.asleep = False
        for name, tensors in self._swaps.items():
            self.model_drafts[name].swap(tensors)
        self._swaps.clear()
        if self._sleep_mode:
            for drafts in self.model_drafts.values():
                drafts.begin()

    def shutdown(self) -> None:
        """Release the device."""
        self._core.shutdown()

    # -- inside -------------------------------------------------------------------------------------------

    def _take_back_drafts(self) -> None:
        """Take drafts off the samples that had no place in the step: they would be verified in a later one."""
        for sample_id in self._drafted:
            request = self._scheduler.requests.get(sample_id)
            if request is not None:
                request.spec_token_ids = []
        self._drafted.clear()

    def _request(self, request: SampleRequest) -> Request:
        """vLLM's form of a sample; the tokens that it brings along are output."""
        sample = Request(
            request_id=request.sample_id,
            prompt_token_ids=list(request.prompt),
            sampling_params=self._sampling_params(request),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )
        if request.prefix:
            sample.append_output_token_ids(list(request.prefix))
        return sample

    def _adopt(self, sample: Request, request: SampleRequest) -> None:
        """Resume a sample from tokens: vLLM sees a preempted request, so the tokens stay output tokens."""
        if not self._coupled:
            raise ValueError("a sample with a prefix needs the coupled runner")
        sample.status = RequestStatus.PREEMPTED
        # vLLM asserts that a first prefill finds no more than the prompt in the prefix cache; the tokens of an
        # adopted sample may be there too, when this engine generated them.
        sample.num_preemptions = 1
        blocks: tuple[list[int], ...] = tuple([] for _ in self._scheduler.kv_cache_config.kv_cache_groups)
        args = (request.sample_id, list(request.prompt), list(request.prefix), sample.sampling_params, blocks)
        self._core.collective_rpc("adopt_sample", args=args)

    def _sampling_params(self, request: SampleRequest) -> SamplingParams:
        sampling = request.sampling
        stops = self._stop_tokens(sampling)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            max_tokens=self._max_tokens(request),
            stop_token_ids=list(stops),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            skip_clone=True,
            **self._by_row(request, stops),
        )

    def _by_row(self, request: SampleRequest, stops: tuple[int, ...]) -> dict[str, Any]:
        """The parameters that our sampler applies itself, row by row.

        vLLM's processors for min_p and min_tokens keep one value a request, wrong for the rows of a draft.
        """
        sampling = request.sampling
        if not self._coupled:
            return {"min_p": sampling.min_p, "min_tokens": sampling.min_tokens}
        noise = SampleNoise(
            seed=request.seed,
            min_p=sampling.min_p,
            min_tokens=sampling.min_tokens,
            forbidden=stops if sampling.min_tokens else (),
            processed_logprobs=sampling.processed_logprobs,
            verifier=request.verifier,
        )
        extra: dict[str, Any] = {NOISE_KEY: asdict(noise)}
        if request.follows:
            extra[CACHED_KEY] = CachedRollout.of(request, self.limits.vocab_size)
        return {"extra_args": extra}

    def _max_tokens(self, request: SampleRequest) -> int:
        room = self.limits.max_model_len - len(request.prompt)
        return room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)

    def _stop_tokens(self, sampling: Sampling) -> tuple[int, ...]:
        own = sampling.stop_token_ids
        return own if sampling.ignore_eos else tuple(dict.fromkeys((*own, *self._eos)))

    def _sample_step(self, output: EngineCoreOutput) -> SampleStep:
        tokens = output.new_token_ids
        logprobs = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
        drafted = reused = 0
        if self._coupled and output.new_logprobs is not None:
            drafted, reused = unpack(output.new_logprobs.sampled_token_ranks)
        step = SampleStep(
            output.request_id,
            tokens,
            logprobs,
            None if output.finish_reason is None else _finish(output.finish_reason),
            drafted,
            min(max(len(tokens) - 1, 0), drafted) if drafted else 0,
            reused,
        )
        if output.request_id in self._cached_logprobs:
            self._give_cached_logprobs(step)
        # A NaN makes the sum NaN, and the sum is all that most steps pay for the check.
        if isnan(sum(logprobs)):
            _cut_at_nan(step)
        return step

    def _give_cached_logprobs(self, step: SampleStep) -> None:
        """Tokens that were taken over get the log-probabilities that they were generated with."""
        reused, left = step.reused, self._cached_logprobs.pop(step.sample_id)
        step.verified_logprobs = step.logprobs[:reused]
        step.logprobs[:reused] = left[:reused]
        if step.finish is None and reused == len(step.token_ids) and reused < len(left):
            self._cached_logprobs[step.sample_id] = left[reused:]

    def _cached_blocks(self) -> int:
        return len(self._scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def _refuse_early_numba() -> None:
    """vLLM's CPU platform walks all loaded modules while it builds a worker, and trips over llvmlite's proxies."""
    if current_platform.is_cpu() and "llvmlite.binding" in sys.modules:
        raise RuntimeError("numba was imported before the engine was built; vLLM 0.32 cannot start after it")


def _finish(reason: FinishReason) -> Finish:
    return _FINISH.get(reason, Finish.ERROR)


def _cut_at_nan(step: SampleStep) -> None:
    """End a sample before the first token that could not be sampled, as an error."""
    keep = next((i for i, value in enumerate(step.logprobs) if isnan(value)), None)
    if keep is None:
        return
    step.finish = Finish.ERROR
    del step.token_ids[keep:], step.logprobs[keep:]
