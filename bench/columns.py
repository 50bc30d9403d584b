"""The columns of BubbleSpec's Tables 2, 3 and 8 from the steps of a replay. Pure.

As in the paper a figure is the mean over the steps of a step's figure, and figures of speculation are of all drafts
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from bench.replay import ReplayedStep
from bench.reuse import index_shares
from bench.scrape import together
from examples.tinymath.spans import bubble_seconds, step_spans
from paceline import Provenance

_PREFIX = "paceline_generation_"
PREGENERATED_TOKENS = f"{_PREFIX}pregenerated_tokens_total"


def columns(steps: Sequence[ReplayedStep]) -> dict[str, Any]:
    """Return all columns; None where there is nothing to tell."""
    provenances = [sample.provenance for step in steps for sample in step.samples.values()]
    return {
        "rollout_seconds": fmean(step.rollout_seconds for step in steps),
        "update_seconds": fmean(step.update_seconds for step in steps),
        "push_seconds": fmean(step.push_seconds for step in steps),
        "step_seconds": fmean(map(step_seconds, steps)),
        "decode_steps_mean": fmean(map(mean_decode_steps, steps)),
        "decode_steps_max": fmean(map(max_decode_steps, steps)),
        "steps_per_token": sum(p.decode_steps for p in provenances) / sum(map(tokens, steps)),
        "response_length_mean": fmean(fmean(lengths(step)) for step in steps),
        "response_length_max": fmean(max(lengths(step)) for step in steps),
        **speculation(provenances),
        **bubbles(steps),
        **pregeneration(steps),
        **halting(steps),
        **index_shares(steps),
    }


def step_seconds(step: ReplayedStep) -> float:
    """Return a training step from end to end."""
    return step.rollout_seconds + step.update_seconds + step.push_seconds


def rollout_and_update(step: ReplayedStep) -> float:
    """Return a training step without the bringing of weights."""
    return step.rollout_seconds + step.update_seconds


def lengths(step: ReplayedStep) -> list[int]:
    """Return the response lengths in tokens."""
    return [len(sample.token_ids) for sample in step.samples.values()]


def tokens(step: ReplayedStep) -> int:
    """Return the number of response tokens."""
    return sum(lengths(step))


def mean_decode_steps(step: ReplayedStep) -> float:
    """Return the mean number of engine steps of a sample."""
    return fmean(sample.provenance.decode_steps for sample in step.samples.values())


def max_decode_steps(step: ReplayedStep) -> float:
    """Return the engine steps of the sample that had most."""
    return max(sample.provenance.decode_steps for sample in step.samples.values())


def speculation(provenances: Sequence[Provenance]) -> dict[str, Any]:
    """Return drafted and accepted tokens, in all and by drafter."""
    drafted, accepted = sum(p.drafted for p in provenances), sum(p.accepted for p in provenances)
    verified = sum(p.verify_steps for p in provenances)
    offered: dict[str, int] = defaultdict(int)
    kept: dict[str, int] = defaultdict(int)
    for source in (source for p in provenances for source in p.draft_sources):
        offered[source.drafter] += source.drafted
        kept[source.drafter] += source.accepted
    return {
        "acceptance_length": 1 + accepted / verified if verified else None,
        "draft_length": drafted / verified if verified else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafters": {
            name: {"drafted": count, "acceptance_rate": kept[name] / count if count else None}
            for name, count in sorted(offered.items())
        },
    }


def bubbles(steps: Sequence[ReplayedStep]) -> dict[str, float]:
    """Time in which an instance had no sample of the step left, until the last instance was done."""
    idle = [
        list(bubble_seconds(step_spans(list(step.samples.values())), step.fleet).values()) for step in steps
    ]
    return {"bubble_seconds_mean": fmean(map(fmean, idle)), "bubble_seconds_max": fmean(map(max, idle))}


def pregeneration(steps: Sequence[ReplayedStep]) -> dict[str, Any]:
    """Return coverage when a step began, and the share of it that samples then agreed with."""
    covered = [length for step in steps for length in step.covered]
    real = sum(map(tokens, steps))
    provenances = [sample.provenance for step in steps for sample in step.samples.values()]
    return {
        "pregenerated_tokens": fmean(step.fleet_metrics[PREGENERATED_TOKENS] for step in steps),
        "draft_length_mean": fmean(covered) if covered else None,
        "draft_length_max": fmean(max(step.covered, default=0) for step in steps) if covered else None,
        "coverage": sum(covered) / real,
        "reused_share": sum(p.reused_prefix for p in provenances) / real,
    }


def halting(steps: Sequence[ReplayedStep]) -> dict[str, float | None]:
    """Return how long pre-generation outlasted its welcome, in seconds.

    Measured after the end of a step, after weights were to be applied, and after a sample of the step
    had arrived.
    """
    counted = together(step.fleet_metrics for step in steps)
    return {
        "halt_delay_seconds": counted.mean(f"{_PREFIX}halt_delay_seconds"),
        "update_halt_seconds": counted.mean(f"{_PREFIX}update_halt_seconds"),
        "yield_seconds": counted.mean(f"{_PREFIX}yield_seconds"),
    }


def reduction(
    plain: Iterable[ReplayedStep], other: Iterable[ReplayedStep], figure: Callable[[ReplayedStep], float]
) -> float:
    """Return the share by which a figure is smaller: 1 less the median over the steps of other / plain."""
    return 1 - median(figure(b) / figure(a) for a, b in zip(plain, other, strict=True))
