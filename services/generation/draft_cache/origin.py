"""Origin of a sample: its run, prompt, slot and step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.internal.v1 import generation_pb2 as pb

PromptKey = tuple[str, str]
"""(run_id, prompt_id)"""


@dataclass(frozen=True, slots=True)
class Origin:
    """Names under which rollouts of a sample are cached; without a run or a prompt, none are."""

    run_id: str = ""
    prompt_id: str = ""
    slot: int = 0
    step: int = 0
    fork: int = 0
    """Above 0 for a fork of a pre-generated sample, as `StoredRollout.fork`."""

    @classmethod
    def of(cls, item: pb.WorkItem) -> Origin:
        """Return the origin of a work item."""
        return cls(item.run_id, item.prompt_id, item.slot, item.step)

    @property
    def prompt(self) -> PromptKey | None:
        """The prompt whose rollouts are cached; None for a sample that belongs to no run."""
        return (self.run_id, self.prompt_id) if self.run_id and self.prompt_id else None


NOWHERE = Origin()
"""Origin of a sample that belongs to no run."""
