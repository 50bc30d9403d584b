"""Figures of the samples that were read, as loggers of experiments take them. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from paceline import types as t


@dataclass(slots=True)
class StepStats:
    """Sums over samples, and of each sample what percentiles need: 20 bytes."""

    _lengths: array[int] = field(default_factory=lambda: array("I"))
    """Response tokens of each sample."""
    _queued: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from acceptance to the first token, of samples that have some."""
    _generated: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from there to the end."""
    _counts: dict[str, int] = field(default_factory=dict)
    _versions: set[int] = field(default_factory=set)
    _begin: float = float("inf")
    _end: float = float("-inf")

    def add(self, sample: t.Sample) -> None:
        """Count a sample."""
        provenance = sample.provenance
        self._lengths.append(len(sample.token_ids))
        if provenance.decode_steps:
            self._queued.append(provenance.queue_seconds)
            self._generated.append(provenance.generation_seconds)
        self._versions.update(span.policy_version for span in sample.version_spans)
        for span in provenance.instance_spans:
            self._begin, self._end = min(self._begin, span.begin), max(self._end, span.end)
        self._count("decode_steps", provenance.decode_steps)
        self._count("drafted", provenance.drafted)
        self._count("accepted", provenance.accepted)
        self._count("reused_prefix", provenance.reused_prefix)
        self._count("migrations", provenance.migrations)
        self._count("resubmissions", provenance.resubmissions)
        self._count("version_spans", len(sample.version_spans))
        self._count("mixed_versions", len(sample.version_spans) > 1)
        for status in (t.SampleStatus.TRUNCATED, t.SampleStatus.ABORTED, t.SampleStatus.FAILED):
            self._count(status.value, sample.status is status)

    def _count(self, name: str, more: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + more

    @classmethod
    def joined(cls, parts: Iterable[StepStats]) -> StepStats:
        """Return the sum of several."""
        whole = cls()
        for part in parts:
            whole._lengths += part._lengths
            whole._queued += part._queued
            whole._generated += part._generated
            whole._versions |= part._versions
            whole._begin, whole._end = min(whole._begin, part._begin), max(whole._end, part._end)
            for name, count in part._counts.items():
                whole._count(name, count)
        return whole

    def figures(self) -> dict[str, float]:
        """Return the figures by name, such as `rollout/response_length/p90`.

        A figure that is not known is not there: shares of nothing, or seconds where no sample was generated.
        """
        samples, tokens = len(self._lengths), sum(self._lengths)
        found: dict[str, float] = {"samples": samples, "tokens": tokens}
        if not samples:
            return _named(found)
        found |= _summary("response_length", self._lengths, ("mean", "p50", "p90", "max"))
        counts = self._counts
        for name in ("truncated", "aborted", "failed", "mixed_versions"):
            found[f"{name}_share"] = counts[name] / samples
        for name in ("decode_steps", "drafted", "accepted", "reused_prefix", "migrations", "resubmissions"):
            found[name] = counts[name]
        if tokens:
            found["drafted_per_token"] = counts["drafted"] / tokens
            found["accepted_token_share"] = counts["accepted"] / tokens
        if counts["drafted"]:
            found["accepted_share"] = counts["accepted"] / counts["drafted"]
        if counts["decode_steps"]:
            found["tokens_per_decode_step"] = tokens / counts["decode_steps"]
        if self._versions:
            found["version_spans_per_sample"] = counts["version_spans"] / samples
            found["version_first"], found["version_last"] = min(self._versions), max(self._versions)
        if self._queued:
            found |= _summary("queue_seconds", self._queued, ("mean", "max"))
            found |= _summary("generation_seconds", self._generated, ("mean", "p50", "p90", "max"))
        if self._begin <= self._end:
            found["seconds"] = self._end - self._begin
        return _named(found)


def _named(figures: dict[str, float]) -> dict[str, float]:
    return {f"rollout/{name}": value for name, value in figures.items()}


def _summary(name: str, values: array[int] | array[float], wanted: tuple[str, ...]) -> dict[str, float]:
    measured = np.asarray(values)
    known = {
        "mean": lambda: measured.mean(),
        "p50": lambda: np.percentile(measured, 50),
        "p90": lambda: np.percentile(measured, 90),
        "max": lambda: measured.max(),
    }
    return {f"{name}/{each}": float(known[each]()) for each in wanted}
