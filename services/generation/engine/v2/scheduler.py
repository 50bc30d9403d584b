"""vLLM's schedulers, with what goes to the workers along with a step.

A step carries, for each sample, how many drafts it verifies (places without a token), the segments of references
that were posted since the last one, the samples that were seen to have left their cached rollouts, and those that
run in it with KV that they brought along. All ranks take them in before the same step, and after they have freed
the slots of samples that left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

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
