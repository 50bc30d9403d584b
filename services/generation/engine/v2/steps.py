"""Steps of an engine on V2, whose drafts are read from the references on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput

from services.generation.engine.core_steps import NO_BRANCHES, CoreSteps, outputs_of
from services.generation.engine.v2.references import DraftSegment
from services.generation.engine.v2.scheduler import DRAFT_PLACE, AheadScheduler, SegmentScheduler


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
