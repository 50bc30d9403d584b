"""Engine: vLLM's engine core in this process, stepped by the caller.

    engine = Engine(EngineOptions(model="/models/policy"))
    engine.add(EngineRequest("s-1", prompt, prefix=(), sampling=sampling, seed=seed))
    while engine.has_work:
        steps = engine.step()

Not thread-safe: one thread builds and calls it. One engine per process, because vLLM keeps global state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from services.generation.engine.environment import V2, check_runner, runner_of, set_variables

set_variables()

from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from kernels.backend import Backend
from services.contracts.errors import RESUMING, FailedPrecondition, ServiceError
from services.contracts.sampling import ModelLimits
from services.generation.engine.arguments import end_tokens, engine_config, refuse_early_numba, ties_head
from services.generation.engine.core_steps import MOST_REPLAYED, CoreSteps
from services.generation.engine.draft_forms import form_of
from services.generation.engine.draft_models.interface import DraftModelClient
from services.generation.engine.draft_models.kinds import wanted
from services.generation.engine.kept_kv import drop_other_kv, held_blocks, keepable
from services.generation.engine.kernel_choice import SAMPLER
from services.generation.engine.migration import EngineMigration
from services.generation.engine.model_support import Feature, ModelSupport
from services.generation.engine.step_log import StepLog
from services.generation.engine.step_sizes import prompt_rows, row_capacity
from services.generation.engine.text import StopStrings, token_bytes
from services.generation.engine.traits import support_of
from services.generation.engine.types import (
    Ending,
    EngineLoad,
    EngineOptions,
    EngineRequest,
    EngineSampleState,
    Finish,
    SampleStep,
)
from services.generation.engine.vllm_requests import (
    WRONG_VALUES,
    PrefixHits,
    VllmRequests,
    refused,
    unsampled,
)
from services.step_time.machine import machine_name


class StaleKVError(RuntimeError):
    """KV of the old weights could not be dropped; the engine must not serve."""


class Engine:
    """vLLM engine core and the samples in it.

    The constructor raises what vLLM raises for a model or device that it cannot use. After an exception from
    `step` vLLM cannot continue, and the caller must end the process.
    """

    def __init__(self, options: EngineOptions) -> None:
        set_variables()
        refuse_early_numba()
        check_runner(options.engine)
        config = engine_config(options)
        make_steps, v2 = CoreSteps, runner_of(options.engine) == V2
        if v2:
            from services.generation.engine.v2.scheduler import use_segments

            make_steps = use_segments(config, ahead=options.schedule_ahead)
            if current_platform.is_cpu():
                from services.generation.engine.v2.interpreted_ranks import interpret_ranks

                interpret_ranks()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._scheduler: Any = self._core.scheduler
        reports = self._core.collective_rpc("kernel_report") if options.coupled else []
        # Features beyond plain decoding that this model allows.
        self.support: ModelSupport = support_of(self._core, config, reports, v2=v2)
        form = form_of(options)
        allowed = form is not None and (
            config.additional_config[form.key] and self.support.allows(form.feature)
        )
        # Form that drafts may have, if they need not be chains.
        self.form = form if allowed else None
        if options.step_log is not None:
            StepLog(self._scheduler, options.step_log)
        drafts = None if form is None else form.in_core(self._core, allowed=self.form is not None)
        self._steps: CoreSteps = make_steps(self._core, coupled=options.coupled, form=drafts)
        vocab_size = config.model_config.get_vocab_size()
        self._folder = Path(options.model)
        self._stops = StopStrings(token_bytes(self._folder, vocab_size))
        ends, most = end_tokens(config.model_config), config.model_config.max_model_len
        self.limits = ModelLimits(vocab_size, most, self._stops.has_text, ends)
        self._hits = PrefixHits(self._scheduler)
        hasher, coupled = self._core.request_block_hasher, options.coupled
        self._requests = VllmRequests(self.limits, hasher, self._stops, self._hits, coupled=coupled)
        # Samples on their way to or from another engine.
        refusal = self.support.refused.get(Feature.MOVES, "")
        self.migration = EngineMigration(
            self._core, self._requests.request, self._stops, coupled, refusal=refusal, slots=v2
        )
        # Draft models by name, in the order of their cost per token.
        self.model_drafts = {
            kind.name: DraftModelClient(self._core, kind.name, own.most_tokens)
            for kind, own in wanted(options).items()
            if self.support.allows(kind.feature)
        }
        self._sleep_mode = options.sleep_mode
        # Weights of draft models that arrived while the engine slept, by name.
        self._swaps: dict[str, Mapping[str, torch.Tensor]] = {}
        self.asleep = False
        self.max_running: int = self._scheduler.max_num_running_reqs
        self.device = current_platform.device_name
        # Name of the hardware, such as NVIDIA H100 80GB HBM3.
        self.hardware = machine_name() if current_platform.is_cpu() else current_platform.get_device_name()
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.ties_head = ties_head(config.model_config)
        self.attention: str = reports[0].attention if reports else "vllm"
        # CUDA graph capture sizes in tokens, ascending.
        self.graph_sizes: Sequence[int] = reports[0].graphs if reports else ()
        # Kinds of kernels that failed their check on any worker.
        self.failed_kernels = sorted({kind for report in reports for kind in report.failed})
        left_out = options.kernels == Backend.REFERENCE or SAMPLER in self.failed_kernels
        if options.coupled and (current_platform.is_cpu() or left_out):
            # Only the host's sampler needs numba; an engine that samples on its device never loads it.
            from kernels.coupled_sampler.cpu import warm_up

            warm_up()

    # -- samples ------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a sample whose tokens and lengths were checked (`services.contracts.sampling`). Wakes the engine.

        Raises:
            InvalidArgument: vLLM refuses it in spite of the earlier checks, or its cached rollout is invalid.
            FailedPrecondition: it has a prefix, and resuming is not known to be exact for this model.
        """
        if request.prefix and (reason := self.support.refused.get(Feature.RESUMING)):
            raise FailedPrecondition(RESUMING, f"prefix_token_ids: {reason}")
        self.wake()
        try:
            sample = self._requests.request(request)
            if request.prefix:
                self.migration.adopt(sample, request)
            self._core.add_request(sample)
        except WRONG_VALUES as error:
            self.abort([request.sample_id])
            raise refused(error) from error
        self._stops.begin(request.sample_id, request.sampling, request.prefix)
        if request.follows:
            self._requests.cached_logprobs[request.sample_id] = request.cached_logprobs

    def finished_by_prefix(self, request: EngineRequest) -> Ending | None:
        """Return how the prefix of a sample ends it already; None if it does not."""
        return self._requests.finished_by_prefix(request)

    def why_unsampled(self, request: EngineRequest, response: Sequence[int]) -> ServiceError:
        """Return why no token could be sampled after this response."""
        return unsampled(self._folder, self.limits, request.sampling, response)

    def abort(self, sample_ids: Iterable[str]) -> None:
        """End samples now and free their KV. Unknown ones are ignored."""
        ended = list(sample_ids)
        self._core.abort_requests(ended)
        self._hits.forget(ended)
        for sample_id in ended:
            self._requests.cached_logprobs.pop(sample_id, None)
            self._stops.end(sample_id)
            self.migration.forget(sample_id)

    def step(self) -> list[SampleStep]:
        """Run one step and return its outputs; with `schedule_ahead`, the outputs of the previous step."""
        return self._outcome(self._steps.step())

    def settle(self) -> list[SampleStep]:
        """Wait for the steps in flight and return their outputs. Required before calls except step and abort."""
        return self._outcome(self._steps.settle())

    @property
    def in_flight(self) -> int:
        """Steps that are scheduled and not finished; 0 unless the engine schedules ahead."""
        return self._steps.in_flight

    def _outcome(self, outputs: Sequence[Any]) -> list[SampleStep]:
        found = self._requests.sample_steps(outputs)
        if self._requests.left_rollouts:
            self._steps.leave_rollouts(self._requests.left_rollouts)
            self._requests.left_rollouts.clear()
        unknown_to_vllm = [step.sample_id for step in found if step.finish is Finish.ERROR]
        if self._stops:
            unknown_to_vllm += [step.sample_id for step in found if self._stops.cut(step)]
        if unknown_to_vllm:
            self.abort(unknown_to_vllm)
        return found

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return self._steps.has_work

    @property
    def load(self) -> EngineLoad:
        """Running and waiting samples, and KV usage."""
        scheduler = self._scheduler
        return EngineLoad(
            len(scheduler.running), len(scheduler.waiting), float(scheduler.kv_cache_manager.usage)
        )

    # -- drafts -------------------------------------------------------------------------------------------

    def decoding(self) -> list[EngineSampleState]:
        """Return the running samples that can verify a draft in the next step."""
        most, states = self.limits.max_model_len, []
        # Reads private fields, because properties cost time for every sample in every step.
        for request in self._scheduler.running:
            length = len(request._all_token_ids)
            behind = length - 1 - request.num_computed_tokens + request.num_output_placeholders
            if not behind or (behind <= MOST_REPLAYED and request.request_id in self._steps.rewound):
                response = request._output_token_ids
                room = min(request.max_tokens - len(response), most - length) - 1
                prompt = request.prompt_token_ids
                states.append(EngineSampleState(request.request_id, prompt, response, room, length, behind))
        return states

    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Set draft tokens for the next step; returns the ones it will verify, none if the model allows no drafts.

        Args:
            drafts: tokens of the vocabulary, by sample. Drafts of a form (draft_forms.py) are cut to chains without
                support for it.
        """
        if not self.support.allows(Feature.DRAFTS):
            return {}
        return self._steps.put(drafts)

    def refuse(self, feature: Feature, reason: str) -> None:
        """Continue without drafts, or with chains only."""
        self.support = self.support.without(feature, reason)
        if self.form is not None and not self.support.allows(self.form.feature):
            self.form = None
        if not self.support.allows(Feature.DRAFTS):
            self.model_drafts.clear()

    def swap_drafter(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of a draft model with checked ones, while samples run.

        A sleeping engine does so when it wakes. A failed load leaves the engine without this draft model.
        """
        if self.asleep and self._sleep_mode:
            self._swaps[name] = tensors
        else:
            self.model_drafts[name].swap(tensors)

    @property
    def row_capacity(self) -> int:
        """Most verified tokens of one step, counting samples and draft tokens; vLLM cuts drafts beyond it."""
        return row_capacity(self._scheduler.max_num_scheduled_tokens, self.limits.vocab_size)

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV fits into the cache."""
        space = self.migration.space
        return space.total_blocks * space.block_size

    @property
    def prompt_rows(self) -> int:
        """Tokens of the next step that drafts should leave to prefill, at most half of the step.

        Drafts that used the whole budget would delay the prefill of others for as long as their samples run.
        """
        return prompt_rows(self._scheduler, self.row_capacity // 2)

    # -- weights and sleep --------------------------------------------------------------------------------

    def keepable(self) -> list[str]:
        """Return the samples whose KV `apply_weights` can keep; none if that is refused for this model."""
        return keepable(self._scheduler) if self.support.allows(Feature.KEEP_KV) else []

    def apply_weights(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        preempt: bool = False,
        keep: Collection[str] = (),
    ) -> int:
        """Load weights in place, and drop KV of the old ones; returns the number of blocks dropped.

        Args:
            tensors: (checkpoint name, tensor) pairs, complete and checked. A failed load leaves vLLM unusable.
            preempt: running samples keep their tokens, and compute their KV again with these weights.
            keep: samples among `keepable` that continue with the KV that they have. No other sample ever reads it.

        Raises:
            StaleKVError: KV of the old weights is still referenced, by other samples than `keep`.
        """
        self.wake()
        held = held_blocks(self._scheduler.kv_cache_manager, keep)
        cached = self._cached_blocks() - len(set(held.values()) - {None})
        for drafts in self.model_drafts.values():
            drafts.forget()
        self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        self.forget_kv(preempt=preempt, keep=keep)
        for drafts in self.model_drafts.values():
            drafts.begin()
        return cached

    def forget_kv(self, *, preempt: bool = False, keep: Collection[str] = ()) -> None:
        """Drop every KV block, and all reservations. StaleKVError if a sample holds KV, without `preempt`.

        Samples of `keep` keep theirs, which is in no prefix cache from then on.
        """
        if self.in_flight:
            raise StaleKVError("a step is in flight: settle first")
        self.migration.withdraw_all(preempt=preempt)
        manager = self._scheduler.kv_cache_manager
        if keep:
            drop_other_kv(self._scheduler, keep)
        elif not self._core.reset_prefix_cache(preempt):
            raise StaleKVError("vLLM refused to reset its prefix cache: KV blocks are still in use")
        pool = manager.block_pool  # vLLM's null block in it is never free.
        left = pool.num_gpu_blocks - 1 - len(held_blocks(manager, keep))
        if self._cached_blocks() or pool.get_num_free_blocks() != left:
            raise StaleKVError("KV blocks survived the reset")

    def sleep(self) -> None:
        """Release the device: drop all KV and, with `sleep_mode`, offload the weights to host memory.

        The engine must be empty. The next sample, or new weights, wake it.
        """
        if self.asleep:
            return
        if self.load.running or self.load.waiting:
            raise RuntimeError("an engine with samples in it cannot sleep")
        while self.has_work:
            # The worker does not know yet that samples have ended since the last step.
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

    def _cached_blocks(self) -> int:
        return len(self._scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)
