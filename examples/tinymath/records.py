"""Records of training steps, and figures derived from them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from examples.tinymath.spans import SampleSpan, bubble_seconds, step_spans
from paceline import Sample, SampleStatus


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Wall time of a step by phase, in seconds."""

    rollout: float
    """Time from the submission to the last sample."""
    update: float
    """Computing rewards and stepping the optimizer."""
    push: float
    """Pushing the new weights to every instance."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """Measurements of the trainer's update on a step."""

    reward: float
    """Mean over the samples."""
    loss: float
    kl: float
    """Divergence of the policy from the sampling policy, in nats, during the update."""
    clip_fraction: float
    """Share of tokens with a ratio outside the clip range."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished training step."""

    step: int
    policy_version: int
    learned: UpdateRecord
    timing: StepTiming
    lengths: tuple[int, ...]
    """[samples], response lengths in tokens."""
    truncated: int
    """Number of samples that reached the length limit."""
    instances: tuple[str, ...]
    """The fleet, including instances without a sample."""
    spans: tuple[SampleSpan, ...]
    drafted: int
    accepted: int
    verify_steps: int
    decode_steps: int
    cached: int
    """Tokens known before the step, pre-generated or from an earlier step; at most the length of each sample."""
    reused: int
    """Cached tokens before the first one that was not kept."""
    migrations: int
    resubmissions: int
    """Summed over the samples, like all fields from `drafted` on."""
    eagle3_drafted: int = 0
    eagle3_accepted: int = 0
    """Parts of `drafted` and `accepted` that the learning head drafted."""
    drafter_version: int = 0
    """Published version at the end of the step; 0: none."""

    @property
    def reward(self) -> float:
        """Mean over the samples."""
        return self.learned.reward

    @property
    def tokens(self) -> int:
        """Response tokens of the step."""
        return sum(self.lengths)

    @property
    def coverage(self) -> float:
        """Cached tokens over response tokens."""
        return self.cached / self.tokens if self.tokens else 0.0

    @property
    def reuse(self) -> float:
        """Reused tokens over response tokens."""
        return self.reused / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second of the rollout."""
        return self.tokens / self.timing.rollout if self.timing.rollout else 0.0

    @property
    def block_efficiency(self) -> float:
        """Accepted tokens plus 1, per verification; 1 without speculation."""
        return 1.0 + self.accepted / self.verify_steps if self.verify_steps else 1.0

    @property
    def bubbles(self) -> dict[str, float]:
        """Idle seconds of each instance."""
        return bubble_seconds(self.spans, self.instances)


def record_step(
    step: int,
    samples: Sequence[Sample],
    learned: UpdateRecord,
    timing: StepTiming,
    version: int,
    fleet: Iterable[str],
) -> StepRecord:
    """Summarise the samples of a step; `fleet` has the ids of all instances."""
    spans = step_spans(samples)
    provenances = [sample.provenance for sample in samples]
    sources = [source for provenance in provenances for source in provenance.draft_sources]
    return StepRecord(
        step=step,
        policy_version=version,
        learned=learned,
        timing=timing,
        lengths=tuple(len(sample.token_ids) for sample in samples),
        truncated=sum(sample.status is SampleStatus.TRUNCATED for sample in samples),
        instances=tuple(sorted({*fleet, *(span.instance_id for span in spans)})),
        spans=spans,
        drafted=sum(p.drafted for p in provenances),
        accepted=sum(p.accepted for p in provenances),
        verify_steps=sum(p.verify_steps for p in provenances),
        decode_steps=sum(p.decode_steps for p in provenances),
        cached=sum(min(s.provenance.cached_tokens, len(s.token_ids)) for s in samples),
        reused=sum(min(s.provenance.reused_prefix, len(s.token_ids)) for s in samples),
        migrations=sum(p.migrations for p in provenances),
        resubmissions=sum(p.resubmissions for p in provenances),
        eagle3_drafted=sum(source.drafted for source in sources if source.drafter == "eagle3"),
        eagle3_accepted=sum(source.accepted for source in sources if source.drafter == "eagle3"),
    )


def percentiles(lengths: Sequence[int]) -> tuple[int, int, int]:
    """Return the median, the 95th percentile and the maximum."""
    if not lengths:
        return 0, 0, 0
    median, high = np.percentile(lengths, [50, 95])
    return round(float(median)), round(float(high)), max(lengths)


def summarize(records: Sequence[StepRecord], options: Mapping[str, object]) -> dict[str, object]:
    """Return the figures of a whole run, ready for JSON."""
    rollout = sum(record.timing.rollout for record in records)
    tokens = sum(record.tokens for record in records)
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    verifications = sum(record.verify_steps for record in records)

    def share(part: int) -> float:
        return part / tokens if tokens else 0.0

    return {
        "options": dict(options),
        "steps": len(records),
        "samples": sum(len(record.lengths) for record in records),
        "tokens": tokens,
        "reward_first": records[0].reward,
        "reward_last": records[-1].reward,
        "rewards": [record.reward for record in records],
        "kl": [record.learned.kl for record in records],
        "clip_fraction": [record.learned.clip_fraction for record in records],
        "rollout_seconds": [record.timing.rollout for record in records],
        "update_seconds": [record.timing.update for record in records],
        "push_seconds": [record.timing.push for record in records],
        "tokens_per_second": tokens / rollout if rollout else 0.0,
        "bubble_seconds": [record.bubbles for record in records],
        "drafted": drafted,
        "accepted": accepted,
        "drafter_versions": [record.drafter_version for record in records],
        "eagle3_drafted": [record.eagle3_drafted for record in records],
        "eagle3_accepted": [record.eagle3_accepted for record in records],
        "block_efficiency": 1.0 + accepted / verifications if verifications else 1.0,
        "cached_share": share(sum(record.cached for record in records)),
        "reused_share": share(sum(record.reused for record in records)),
        "migrations": sum(record.migrations for record in records),
        "resubmissions": sum(record.resubmissions for record in records),
    }


def save_steps(path: Path, records: Sequence[StepRecord]) -> None:
    """Write all records as JSON."""
    path.write_text(json.dumps([asdict(record) for record in records]))
