"""Figures of a simulated step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from services.simulator.modelled_instance import DecodingTotals, ModelledInstance
from services.simulator.sample_batch import SimulatedSample


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Step of a run. Times are in seconds, lengths in tokens; bubbles are of instances, from their last sample on.

    `acceptance_length` counts the tokens of a verified draft, the policy's own included; `draft_length` its drafted
    ones. `covered` are tokens of a sample that were pre-generated. `busy` is the share of instance time with
    samples.
    """

    seconds: float
    samples: int
    tokens: int
    longest: int
    decode_steps: float
    most_decode_steps: int
    step_seconds: float
    bubble_seconds: float
    longest_bubble: float
    busy: float
    acceptance_length: float
    draft_length: float
    acceptance_rate: float
    covered: float
    most_covered: int
    moved: int
    preempted: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the whole cluster."""
        return self.tokens / self.seconds


def summary(
    instances: Sequence[ModelledInstance],
    samples: Sequence[SimulatedSample],
    totals: DecodingTotals,
    began: float,
    ended: float,
    moved: int,
) -> SimulatedStep:
    """Return the figures of a step whose samples have all ended, each once."""
    assert all(each.ends == 1 for each in samples), "a sample has not ended once"
    bubbles = [max(0.0, ended - each.busy_until) for each in instances]
    drafts = totals.drafts or 1.0
    return SimulatedStep(
        seconds=ended - began,
        samples=len(samples),
        tokens=sum(each.length for each in samples),
        longest=max(each.length for each in samples),
        decode_steps=fmean(each.decode_steps for each in samples),
        most_decode_steps=max(each.decode_steps for each in samples),
        step_seconds=totals.seconds / totals.steps,
        bubble_seconds=fmean(bubbles),
        longest_bubble=max(bubbles),
        busy=1 - fmean(bubbles) / (ended - began),
        acceptance_length=1 + totals.accepted / drafts,
        draft_length=totals.drafted / drafts,
        acceptance_rate=totals.accepted / totals.drafted if totals.drafted else 0.0,
        covered=fmean(each.covered for each in samples),
        most_covered=max(each.covered for each in samples),
        moved=moved,
        preempted=totals.preempted,
    )
