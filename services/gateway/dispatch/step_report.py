"""Report of a step that is over: which instance did what when, and what the step waited for. Pure.

The bubble of an instance is the time from the end of its last sample of a step to the end of the step's last
sample; where it had none, from the beginning. Times are unix seconds.

A report holds an entry for each instance and the few samples that ended last, whatever the number of samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.batches.sample import GenerationSpan
from services.gateway.dispatch.activity import ActivityCurve
from services.gateway.dispatch.critical_path import TimedSample, path_of
from services.platform.redis.decision_log import DecisionRecord

KIND = "step"
"""Kind of the decision-log entry of a step."""
SHOWN = 24
"""Most instances of which an entry has a curve of their own."""
_LAST = 3


@dataclass(slots=True)
class InstanceShare:
    """Part of one instance in a step; `curve` counts its samples from the step's begin."""

    curve: ActivityCurve
    begin: float
    end: float
    samples: int = 0
    tokens: int = 0

    def add(self, span: GenerationSpan) -> None:
        """Count a part of a sample."""
        self.begin, self.end = min(self.begin, span.begin), max(self.end, span.end)
        self.samples += 1
        self.tokens += span.end_token - span.begin_token
        self.curve.add(span.begin, span.end)


@dataclass(slots=True)
class StepReport:
    """Report of a step.

    `shares`: part of each instance that had samples. `tokens` of its samples; `pregenerated` of them existed
    before, None where the step was not hinted. `last`: the samples that ended last, in order.
    """

    run_id: str
    step: int
    begun_at: float
    ended_at: float
    unfinished: int = 0
    samples: int = 0
    shares: dict[str, InstanceShare] = field(default_factory=dict)
    tokens: int = 0
    pregenerated: int | None = None
    last: deque[TimedSample] = field(default_factory=lambda: deque(maxlen=_LAST))

    def add(self, spans: Iterable[GenerationSpan], tokens: int, now: float) -> None:
        """Count a sample that has ended."""
        for span in spans:
            if not span.instance_id:
                continue
            share = self.shares.get(span.instance_id)
            if share is None:
                curve = ActivityCurve(self.begun_at)
                share = self.shares[span.instance_id] = InstanceShare(curve, span.begin, span.end)
            share.add(span)
        self.samples += 1
        self.tokens += tokens
        self.ended_at = max(self.ended_at, now)
        self.unfinished -= 1

    def bubbles(self, serving: Iterable[str]) -> dict[str, float]:
        """Return the idle seconds of each instance that had samples of the step or could have had some."""
        names = {*self.shares, *serving}
        ends = {name: share.end for name, share in self.shares.items()}
        return {name: max(0.0, self.ended_at - ends.get(name, self.begun_at)) for name in names}


class IdleTimeBook:
    """Steps in work. Batches of the same step count as one while they overlap."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], StepReport] = {}

    def begin(
        self, run_id: str, step: int, samples: int, now: float, pregenerated: int | None = None
    ) -> None:
        """Begin so many samples of a step."""
        key = (run_id, step)
        report = self._steps.setdefault(key, StepReport(run_id, step, now, now))
        report.unfinished += samples
        if pregenerated is not None:
            report.pregenerated = pregenerated + (report.pregenerated or 0)
        self._close(key)

    def end(
        self,
        run_id: str,
        step: int,
        spans: Iterable[GenerationSpan],
        tokens: int,
        now: float,
        ended: TimedSample | None = None,
        ahead: int = 0,
    ) -> StepReport | None:
        """Record the end of a sample; return the report if it was the last one of the step.

        `ahead` of its tokens existed when the step began.
        """
        report = self._steps.get((run_id, step))
        if report is None:
            return None
        report.add(spans, tokens, now)
        if report.pregenerated is not None:
            report.pregenerated += ahead
        if ended is not None:
            report.last.append(ended)
        return self._close((run_id, step))

    def drop(self, run_id: str, step: int, samples: int) -> None:
        """Give up so many samples of a step."""
        report = self._steps.get((run_id, step))
        if report is not None:
            report.unfinished -= samples
            self._close((run_id, step))

    def _close(self, key: tuple[str, int]) -> StepReport | None:
        return self._steps.pop(key) if self._steps[key].unfinished <= 0 else None


def step_record(report: StepReport, bubbles: Mapping[str, float], version: int) -> DecisionRecord:
    """Return the decision-log entry of a step, given the idle seconds of its instances and its policy version."""
    seconds, idle = report.ended_at - report.begun_at, sum(bubbles.values())
    share = idle / (seconds * len(bubbles)) if seconds > 0 and bubbles else 0.0
    words = (
        f"step {report.step}: {report.samples} samples of {report.tokens} tokens in {seconds:.1f} s; "
        f"{share:.0%} of the time of {len(bubbles)} instances was bubbles"
        + ("; nobody announced it" if report.pregenerated is None else "")
    )
    curves = [each.curve for each in report.shares.values()]
    width = max((curve.width for curve in curves), default=seconds)
    details: dict[str, Any] = {
        "step": report.step,
        "version": version,
        "begun": round(report.begun_at, 4),
        "ended": round(report.ended_at, 4),
        "samples": report.samples,
        "tokens": report.tokens,
        "pregenerated": report.pregenerated,
        "instances": len(bubbles),
        "bubble_seconds": round(idle, 4),
        "bin": width,
        "rows": [_row(report, name, bubbles[name], width) for name in _shown(bubbles)],
        "all": _sum_of([_counts(curve, report.ended_at, width) for curve in curves]),
        "last": [path_of(each) for each in reversed(report.last)],
    }
    return DecisionRecord(KIND, words, 0.0, details, report.ended_at, report.run_id)


def _shown(bubbles: Mapping[str, float]) -> list[str]:
    """Return the instances that an entry shows: all, or those that were busy longest and those that idled most."""
    if len(bubbles) <= SHOWN:
        return sorted(bubbles)
    ordered = sorted(bubbles, key=lambda name: (bubbles[name], name))
    return ordered[: SHOWN // 2] + ordered[-SHOWN // 2 :]


def _row(report: StepReport, name: str, bubble: float, width: float) -> list[Any]:
    share = report.shares.get(name)
    if share is None:
        return [name, None, None, 0, 0, round(bubble, 3), []]
    counts = _counts(share.curve, share.end, width)
    times = round(share.begin, 3), round(share.end, 3)
    return [name, *times, share.samples, share.tokens, round(bubble, 3), counts]


def _counts(curve: ActivityCurve, end: float, width: float) -> list[int]:
    while curve.width < width:
        curve.widen()
    return curve.counts(end)


def _sum_of(columns: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, columns), default=0)
    return [sum(each[place] for each in columns if place < len(each)) for place in range(longest)]
