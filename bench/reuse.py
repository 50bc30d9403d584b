"""The figures of SPEC-RL's tables from the steps of a run that meets its prompts again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from bench.replay import ReplayedStep
from bench.scrape import together
from bench.training import Samples
from paceline import Sample

VERIFIED_ROWS = "paceline_reuse_verified_rows_total"
TAKEN_OVER = "paceline_reuse_tokens_total"
INDEX_SECONDS = "paceline_drafts_index_seconds_total"


def reuse(steps: Sequence[Samples]) -> dict[str, Any]:
    """Return the share of cached rollouts that was reused, over all steps together."""
    samples = [sample for step in steps for sample in step.values()]
    tokens = sum(len(sample.token_ids) for sample in samples)
    decode_steps = sum(sample.provenance.decode_steps for sample in samples)
    cached = [sample for sample in samples if sample.provenance.cached_tokens]
    drafted = sum(sample.provenance.drafted for sample in samples)
    accepted = sum(sample.provenance.accepted for sample in samples)
    return {
        "tokens": tokens,
        "response_length_mean": tokens / len(samples),
        "decode_steps": decode_steps,
        "steps_per_token": decode_steps / tokens,
        "acceptance_rate": accepted / drafted if drafted else None,
        "cached_share": sum(sample.provenance.cached_tokens for sample in samples) / tokens,
        "reused_share": reused_share(steps),
        "full_reuse_share": fmean(map(wholly_reused, cached)) if cached else 0.0,
        "lossless": all(sample.provenance.lossless for sample in samples),
    }


def reused_share(steps: Iterable[Samples]) -> float:
    """Return the share of all tokens that were kept of earlier rollouts."""
    samples = [sample for step in steps for sample in step.values()]
    reused = sum(sample.provenance.reused_prefix for sample in samples)
    return reused / sum(len(sample.token_ids) for sample in samples)


def wholly_reused(sample: Sample) -> bool:
    """Return True if a sample consists of cached tokens only."""
    return sample.provenance.reused_prefix == len(sample.token_ids)


def replayed(steps: Sequence[ReplayedStep]) -> dict[str, Any]:
    """Return the same of a replay, with its times and what verification cost.

    `wasted_rows_per_token` are rows of logits that verifying cached rollouts took without giving a token of theirs.
    """
    counted = together(step.fleet_metrics for step in steps)
    figures = reuse([step.samples for step in steps])
    return {
        **figures,
        "rollout_seconds": fmean(step.rollout_seconds for step in steps),
        "wasted_rows_per_token": (counted[VERIFIED_ROWS] - counted[TAKEN_OVER]) / figures["tokens"],
        **index_shares(steps),
    }


def index_shares(steps: Sequence[ReplayedStep]) -> dict[str, float]:
    """Return the share of rollout time that the suffix index takes: inserting rollouts, and following samples."""
    counted = together(step.fleet_metrics for step in steps)
    whole = sum(step.rollout_seconds * len(step.fleet) for step in steps)
    return {
        "build_share_of_rollout": counted[f'{INDEX_SECONDS}{{phase="insert"}}'] / whole,
        "follow_share_of_rollout": counted[f'{INDEX_SECONDS}{{phase="step"}}'] / whole,
    }
