"""vLLM's schedulers for V2, and the steps of an engine whose drafts are read from references on the device.

A step carries, for each sample, how many drafts it verifies (places without a token), the segments of references
that were posted since the last step, the samples that were seen to have left their cached rollouts, and the
samples that run in it with KV from elsewhere. All ranks take them in before the same step, and after they have
freed the slots of samples that left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from services.generation.engine.core_steps import NO_BRANCHES, CoreSteps, outputs_of
from services.generation.engine.v2.references import DraftSegment

DRAFT_PLACE = -1
"""A draft token that only the device knows, in a request and in a scheduled step."""


class SegmentsMixin:
    """Mixin for a scheduler of vLLM's."""

    requests: dict[str, Any]
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segments: list[DraftSegment] = []
        self._adopted: dict[str, NewRequestData] = {}
        self._left: list[str] = []

    def leave_rollouts(self, sample_ids: Iterable[str]) -> None:
        """Tell the workers with the next step that samples do not follow their cached rollouts any more."""
        self._left.extend(sample_ids)

    def post(self, segments: Iterable[DraftSegment]) -> None:
        """Send segments with the next step."""
        self._segments.extend(segments)

    def adopt(self, sample: Request) -> None:
        """Tell the workers, with its first step, of a running sample that has KV of all its tokens but the last."""
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
        """Do not tell the workers of a sample, which does not run any more."""
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
    """Scheduler of an engine that knows the outcome of each step before the next."""


class AheadScheduler(SegmentsMixin, AsyncScheduler):
    """Scheduler of an engine that schedules one step further, while the device is at the last."""


class SegmentSteps(CoreSteps):
    """Steps of V2: one at a time, or with the next scheduled while the device is at the last.

    With one in flight the host does not know how many tokens a sample has, but at most how many more: a draft is
    verified from where the sample would be if all of its drafts in flight were accepted.
    """

    @property
    def in_flight(self) -> int:  # type: ignore[override]
        """Steps that are scheduled and not over."""
        return len(self._core.batch_queue or ())

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return bool(self.in_flight) or super().has_work

    def put(
        self, drafts: Mapping[str, Sequence[int]], parents: Mapping[str, Sequence[int]] = NO_BRANCHES
    ) -> Mapping[str, Sequence[int]]:
        """Post drafts behind the tokens that are known; the next step verifies what is not in flight of them."""
        requests, verified = self._scheduler.requests, dict[str, Sequence[int]]()
        if parents:
            drafts = self._put_trees(drafts, parents)
        for sample_id, tokens in drafts.items():
            request = requests[sample_id]
            if left := tokens[request.num_output_placeholders :]:
                self._scheduler.post([DraftSegment(sample_id, request.num_tokens, tokens)])
                request.spec_token_ids = [DRAFT_PLACE] * len(left)
                self._drafted.append(sample_id)
                verified[sample_id] = left
        return verified

    def step(self) -> list[EngineCoreOutput]:
        """Schedule a step, and return the outcome of the one before; without looking ahead that of the same."""
        core = self._core
        outputs, _ = core.step() if core.batch_queue is None else core.step_with_batch_queue()
        self._take_back()
        return outputs_of(outputs)

    def leave_rollouts(self, sample_ids: Iterable[str]) -> None:
        """Take note of samples that follow their cached rollouts no more."""
        self._scheduler.leave_rollouts(sample_ids)

    def settle(self) -> list[EngineCoreOutput]:
        """Let the steps that are in flight end, and schedule none."""
        found = list[EngineCoreOutput]()
        while self._core.batch_queue:
            future, scheduled, _ = self._core.batch_queue.pop()
            found += outputs_of(self._scheduler.update_from_output(scheduled, future.result()))
        return found


def use_segments(config: Any, *, ahead: bool) -> type[CoreSteps]:
    """Set the scheduler of a vLLM configuration to ours, `ahead` one step of the device; returns what steps it."""
    # vLLM's CPU platform switches this off, for the sake of V1.
    config.scheduler_config.async_scheduling = ahead
    config.scheduler_config.scheduler_cls = AheadScheduler if ahead else SegmentScheduler
    return SegmentSteps
