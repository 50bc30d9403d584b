"""Spans of a step: when each instance generated each sample, the length of the step, and its bubbles. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline import Sample


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """One instance worked on one sample from `begin` to `end`, in seconds from the start of the step."""

    instance_id: str
    begin: float
    end: float


def step_begin(samples: Iterable[Sample]) -> float:
    """Return the time at which the first sample was begun, in seconds since the epoch; 0 if none was."""
    spans = (span for sample in samples for span in sample.provenance.instance_spans)
    return min((span.begin for span in spans), default=0.0)


def step_spans(samples: Sequence[Sample]) -> tuple[SampleSpan, ...]:
    """Return all spans of a step, in seconds from the begin of the first one."""
    start = step_begin(samples)
    spans = (span for sample in samples for span in sample.provenance.instance_spans)
    return tuple(SampleSpan(span.instance_id, span.begin - start, span.end - start) for span in spans)


def bubble_seconds(spans: Iterable[SampleSpan], instances: Iterable[str]) -> dict[str, float]:
    """Return the seconds of the step, from first begin to last end, in which each instance had no sample."""
    spans = list(spans)
    length, own = step_seconds(spans), by_instance(spans)
    return {name: length - _covered(own.get(name, ())) for name in instances}


def step_seconds(spans: Iterable[SampleSpan]) -> float:
    """Return the seconds from the first begin to the last end."""
    return max((span.end for span in spans), default=0.0)


def by_instance(spans: Iterable[SampleSpan]) -> dict[str, list[SampleSpan]]:
    """Return the spans of each instance."""
    found: dict[str, list[SampleSpan]] = defaultdict(list)
    for span in spans:
        found[span.instance_id].append(span)
    return dict(found)


def _covered(spans: Iterable[SampleSpan]) -> float:
    """Return the length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return covered
