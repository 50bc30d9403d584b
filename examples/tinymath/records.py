"""What a training step is remembered by, and what follows from it: lengths, bubbles, timelines. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline import Sample, SampleStatus


@dataclass(frozen=True, slots=True)
class Span:
    """One instance worked on one sample from `begin` to `end`, in seconds from the start of the step."""

    instance_id: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the wall time of a step went, in seconds."""

    rollout: float
    """From the submission to the last sample."""
    update: float
    """Rewards, and the optimizer's step."""
    push: float
    """Writing the new weights and bringing them to every instance."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished training step."""

    step: int
    policy_version: int
    reward: float
    """Mean over the samples."""
    loss: float
    timing: Timing
    lengths: tuple[int, ...]
    """[samples], response lengths in tokens."""
    truncated: int
    """Samples that ran into the length limit."""
    instances: tuple[str, ...]
    """The fleet, those that got no sample included."""
    spans: tuple[Span, ...]
    drafted: int
    accepted: int
    verify_steps: int
    decode_steps: int
    """Summed over the samples, as the three before."""
    migrations: int
    resubmissions: int

    @property
    def tokens(self) -> int:
        """Response tokens of the step."""
        return sum(self.lengths)

    @property
    def tokens_per_second(self) -> float:
        """Over the rollout alone."""
        return self.tokens / self.timing.rollout if self.timing.rollout else 0.0

    @property
    def block_efficiency(self) -> float:
        """Accepted + 1 per verification; 1 without speculation."""
        return 1.0 + self.accepted / self.verify_steps if self.verify_steps else 1.0

    @property
    def bubbles(self) -> dict[str, float]:
        """Idle seconds of each instance."""
        return bubble_seconds(self.spans, self.instances)


def record_step(
    step: int,
    samples: Sequence[Sample],
    reward: float,
    loss: float,
    timing: Timing,
    version: int,
    fleet: Iterable[str],
) -> StepRecord:
    """Sums up the samples of a step that this fleet could take part in."""
    spans = step_spans(samples)
    provenances = [sample.provenance for sample in samples]
    return StepRecord(
        step=step,
        policy_version=version,
        reward=reward,
        loss=loss,
        timing=timing,
        lengths=tuple(len(sample.token_ids) for sample in samples),
        truncated=sum(sample.status is SampleStatus.TRUNCATED for sample in samples),
        instances=tuple(sorted({*fleet, *(span.instance_id for span in spans)})),
        spans=spans,
        drafted=sum(p.drafted for p in provenances),
        accepted=sum(p.accepted for p in provenances),
        verify_steps=sum(p.verify_steps for p in provenances),
        decode_steps=sum(p.decode_steps for p in provenances),
        migrations=sum(p.migrations for p in provenances),
        resubmissions=sum(p.resubmissions for p in provenances),
    )


def step_spans(samples: Iterable[Sample]) -> tuple[Span, ...]:
    """All spans of a step, from the first one's begin."""
    spans = [span for sample in samples for span in sample.provenance.instance_spans]
    start = min((span.begin for span in spans), default=0.0)
    return tuple(Span(span.instance_id, span.begin - start, span.end - start) for span in spans)


def bubble_seconds(spans: Iterable[Span], instances: Iterable[str]) -> dict[str, float]:
    """Seconds within the step (first begin to last end of any instance) in which an instance had no sample."""
    spans = list(spans)
    length, own = step_seconds(spans), by_instance(spans)
    return {name: length - _covered(own.get(name, ())) for name in instances}


def step_seconds(spans: Iterable[Span]) -> float:
    """From the first begin to the last end."""
    return max((span.end for span in spans), default=0.0)


def active_samples(spans: Iterable[Span]) -> tuple[list[float], list[int]]:
    """Times, and how many samples are active from each time to the next."""
    changes: dict[float, int] = defaultdict(int)
    for span in spans:
        changes[span.begin] += 1
        changes[span.end] -= 1
    times = sorted(changes)
    return times, np.cumsum([changes[time] for time in times], dtype=int).tolist()


def by_instance(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each instance."""
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.instance_id].append(span)
    return dict(found)


def percentiles(lengths: Sequence[int]) -> tuple[int, int, int]:
    """Median, 95th percentile and maximum."""
    if not lengths:
        return 0, 0, 0
    median, high = np.percentile(lengths, [50, 95])
    return round(float(median)), round(float(high)), max(lengths)


def summarize(records: Sequence[StepRecord], options: Mapping[str, object]) -> dict[str, object]:
    """The figures of a whole run, ready for JSON."""
    rollout = sum(record.timing.rollout for record in records)
    tokens = sum(record.tokens for record in records)
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    verifications = sum(record.verify_steps for record in records)
    return {
        "options": dict(options),
        "steps": len(records),
        "samples": sum(len(record.lengths) for record in records),
        "tokens": tokens,
        "reward_first": records[0].reward,
        "reward_last": records[-1].reward,
        "rewards": [record.reward for record in records],
        "rollout_seconds": [record.timing.rollout for record in records],
        "update_seconds": [record.timing.update for record in records],
        "push_seconds": [record.timing.push for record in records],
        "tokens_per_second": tokens / rollout if rollout else 0.0,
        "bubble_seconds": [record.bubbles for record in records],
        "drafted": drafted,
        "accepted": accepted,
        "block_efficiency": 1.0 + accepted / verifications if verifications else 1.0,
        "migrations": sum(record.migrations for record in records),
        "resubmissions": sum(record.resubmissions for record in records),
    }


def save_steps(path: Path, records: Sequence[StepRecord]) -> None:
    """Writes all records, so that a report can be made again."""
    path.write_text(json.dumps([asdict(record) for record in records]))


def load_steps(path: Path) -> list[StepRecord]:
    """Reads what `save_steps` wrote."""
    return [_from_json(entry) for entry in json.loads(path.read_text())]


def _from_json(entry: dict[str, object]) -> StepRecord:
    timing, spans, lengths = entry.pop("timing"), entry.pop("spans"), entry.pop("lengths")
    instances = entry.pop("instances")
    return StepRecord(
        timing=Timing(**timing),  # type: ignore[arg-type]
        spans=tuple(Span(**span) for span in spans),  # type: ignore[attr-defined]
        lengths=tuple(lengths),  # type: ignore[arg-type]
        instances=tuple(instances),  # type: ignore[arg-type]
        **entry,  # type: ignore[arg-type]
    )


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return covered
