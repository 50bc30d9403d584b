"""Schedule V2's steps, whose drafts are read from references on the device.

A scheduled step has, for each sample, the number of drafts to verify (placeholders without a token), the reference
segments posted since the previous step, the samples known to have left their cached rollouts, and the samples that
enter with KV from another engine. All ranks process these before the same step, after freeing the slots of samples
that left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from services.generation.engine.core_steps import CoreSteps, outputs_of
from services.generation.engine.v2.references import DraftSegment

DRAFT_PLACE = -1
"""Placeholder for a draft token that only the device knows, in a request and in a scheduled step."""


class SegmentsMixin:
    """Mixin for vLLM's schedulers that sends our data to the workers with each step."""

    requests: dict[str, Any]
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segments: list[DraftSegment] = []
        self._adopted: dict[str, NewRequestData] = {}
        self._left: list[str] = []

    def leave_rollouts(self, sample_ids: Iterable[str]) -> None:
        """Report to the workers, with the next step, that samples no longer follow their cached rollouts."""
        self._left.extend(sample_ids)

    def post(self, segments: Iterable[DraftSegment]) -> None:
        """Send segments with the next step."""
        self._segments.extend(segments)

    def adopt(self, sample: Request) -> None:
        """Send a running sample that has KV of all tokens but the last to the workers, with its first step here."""
        tokens, name = list(sample._all_token_ids), sample.request_id
        blocks = self.kv_cache_manager.get_block_ids(name)
        self._adopted[name] = NewRequestData(
            name,
            sample.prompt_token_ids,
            [],
            sample.sampling_params,
            None,
            blocks,
            len(tokens) - 1,
            None,
            prefill_token_ids=tokens,
        )

    def leave(self, sample_id: str) -> None:
        """Do not send an adopted sample to the workers, because it no longer runs."""
        self._adopted.pop(sample_id, None)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, as vLLM does."""
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        output.paceline_segments, self._segments = self._segments, []
        output.paceline_left, self._left = self._left, []
        output.paceline_adopted = self._entering(output) if self._adopted else []
        return output

    def _entering(self, output: Any) -> list[NewRequestData]:
        """Return the adopted samples that run in a step; those that ended or were preempted are forgotten."""
        new = {sample.req_id for sample in output.scheduled_new_reqs}
        for name in list(self._adopted):
            request = self.requests.get(name)
            if request is None or request.status != RequestStatus.RUNNING or name in new:
                del self._adopted[name]
        return [
            self._adopted.pop(name) for name in list(self._adopted) if name in output.num_scheduled_tokens
        ]


class SegmentScheduler(SegmentsMixin, Scheduler):
    """Scheduler of an engine that knows the outcome of each step before it schedules the next."""


class AheadScheduler(SegmentsMixin, AsyncScheduler):
    """Scheduler of an engine that schedules a step while the device still computes the previous one."""


class SegmentSteps(CoreSteps):
    """Steps of V2: one at a time, or each scheduled while the device still computes the previous one.

    With a step in flight the host does not know how many tokens a sample has, only the most it can have. A draft is
    verified from the position that the sample reaches if all of its drafts in flight are accepted.
    """

    @property
    def in_flight(self) -> int:  # type: ignore[override]
        """Steps that are scheduled and not finished."""
        return len(self._core.batch_queue or ())

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return bool(self.in_flight) or super().has_work

    def put(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Post drafts that follow the known tokens; the next step verifies the part that is not in flight."""
        requests, verified = self._scheduler.requests, dict[str, Sequence[int]]()
        if self._form is not None:
            drafts = self._form.put(drafts)
        for sample_id, tokens in drafts.items():
            request = requests[sample_id]
            if left := tokens[request.num_output_placeholders :]:
                self._scheduler.post([DraftSegment(sample_id, request.num_tokens, tokens)])
                request.spec_token_ids = [DRAFT_PLACE] * len(left)
                self._drafted.append(sample_id)
                verified[sample_id] = left
        return verified

    def step(self) -> list[EngineCoreOutput]:
        """Schedule a step, and return the output of the previous one; of the same step if not scheduling ahead."""
        core = self._core
        outputs, _ = core.step() if core.batch_queue is None else core.step_with_batch_queue()
        self._take_back()
        return outputs_of(outputs)

    def leave_rollouts(self, sample_ids: Iterable[str]) -> None:
        """Record samples that no longer follow their cached rollouts."""
        self._scheduler.leave_rollouts(sample_ids)

    def settle(self) -> list[EngineCoreOutput]:
        """Finish the steps in flight without scheduling another; returns their outputs."""
        found = list[EngineCoreOutput]()
        while self._core.batch_queue:
            future, scheduled, _ = self._core.batch_queue.pop()
            found += outputs_of(self._scheduler.update_from_output(scheduled, future.result()))
        return found


def use_segments(config: Any, *, ahead: bool) -> type[CoreSteps]:
    """Set our scheduler in a vLLM configuration, `ahead` of the device or not; returns the class of its steps."""
    # vLLM's CPU platform disables this because of V1.
    config.scheduler_config.async_scheduling = ahead
    config.scheduler_config.scheduler_cls = AheadScheduler if ahead else SegmentScheduler
    return SegmentSteps
