"""Report of a finished step: the work of each instance over time, and the critical path. Pure.

The bubble of an instance is the time from the end of its last sample of a step to the end of the step's last
sample; without a sample, from the beginning of the step. The critical path splits the time of the samples that
ended last. Times are unix seconds. The size of a report depends on the number of instances, not of samples.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, zip_longest
from typing import Any, NamedTuple

from services.gateway.state.sample import GatewaySample
from services.platform.redis.decision_log import DecisionRecord

BINS = 64
"""Most bins of a curve."""
_FIRST_WIDTH = 1 / 64


class InstanceShare:
    """Work of one instance in a step that began at `origin`, in unix seconds.

    Adding a sample is O(1), whatever its length. When one ends after the last bin, all bins become twice as wide,
    so at least half of the bins are used. Samples shorter than a bin may then vanish from the counts.
    """

    def __init__(self, origin: float) -> None:
        self.begin, self.end = math.inf, -math.inf
        """Begin of the first sample and end of the last one, in unix seconds."""
        self.samples = self.tokens = 0
        self.width = _FIRST_WIDTH
        """Seconds of a bin."""
        self._origin = origin
        # For each bin, the number of samples minus the number in the previous bin.
        self._changes = [0] * BINS

    def add(self, begin: float, end: float, tokens: int) -> None:
        """Count a part of a sample, which ran between two times, in unix seconds."""
        self.begin, self.end = min(self.begin, begin), max(self.end, end)
        self.samples += 1
        self.tokens += tokens
        self.widen((end - self._origin) / BINS)
        self._changes[self._bin(begin)] += 1
        last = self._bin(end) + 1
        if last < BINS:
            self._changes[last] -= 1

    def widen(self, width: float) -> None:
        """Make bins twice as wide until they have `width` seconds."""
        while self.width < width:
            pairs = zip(self._changes[::2], self._changes[1::2], strict=True)
            self._changes = [one + other for one, other in pairs] + [0] * (BINS // 2)
            self.width *= 2

    def counts(self, end: float) -> list[int]:
        """Return the number of samples in each bin up to a time, in unix seconds."""
        return list(accumulate(self._changes))[: self._bin(end) + 1]

    def _bin(self, time: float) -> int:
        return min(BINS - 1, max(0, int((time - self._origin) / self.width)))


_MOST_PATH_SPANS = 12
_MOST_NAME = 64


class TimedSample(NamedTuple):
    """A sample that has ended: its state and prompt, its number of tokens, and unix seconds of begin and end."""

    sample: GatewaySample
    prompt_id: str
    tokens: int
    accepted_at: float
    ended_at: float


def time_parts(ended: TimedSample) -> dict[str, float]:
    """Return the seconds of each of `STEP_PARTS`, none negative; their sum is the time from acceptance to the end.

    Instances measure their steps with their own clocks. If their sum exceeds the time that passed, it is scaled
    down. Another gateway's clock may have accepted the sample, even after the end.
    """
    sample = ended.sample
    end = max(ended.ended_at, ended.accepted_at)
    first = min(max(sample.first_step_at or end, ended.accepted_at), end)
    left = end - ended.accepted_at - (queue := first - ended.accepted_at)
    steps = {
        "prefill": sample.prefill_seconds,
        "plain": sample.plain_seconds,
        "verified": sample.verify_seconds,
    }
    said = max(sample.generation_seconds, sum(steps.values()))
    scale = min(1.0, left / said) if said else 0.0
    steps = {name: seconds * scale for name, seconds in steps.items()}
    outside = max(0.0, left - said * scale)
    moved = outside if len(sample.spans) > 1 else 0.0
    between = max(0.0, left - sum(steps.values()) - moved)
    return {"queue": queue, **steps, "moves": moved, "between": between}


def path_of(ended: TimedSample) -> dict[str, Any]:
    """Return the entry of a sample, with its last spans. Times are in unix seconds, parts in seconds."""
    sample = ended.sample
    return {
        "prompt": ended.prompt_id[:_MOST_NAME],
        "slot": sample.slot,
        "tokens": ended.tokens,
        "accepted": round(ended.accepted_at, 4),
        "ended": round(ended.ended_at, 4),
        "parts": {name: round(seconds, 4) for name, seconds in time_parts(ended).items()},
        "decode_steps": sample.decode_steps,
        "verify_steps": sample.verify_steps,
        "restarts": sample.resubmissions,
        "spans": [
            [span.instance_id, round(span.begin, 3), round(span.end, 3), span.end_token - span.begin_token]
            for span in sample.spans[-_MOST_PATH_SPANS:]
        ],
    }


STEP_KIND = "step"
"""Kind of a decision-log entry about a step."""
SHOWN = 24
"""Most instances with a separate curve in an entry."""
_LAST_SAMPLES = 3
_MOST_RUNS = 1000
"""Most runs whose last step is known; a further run replaces the one whose step ended first.

Also the most runs with an idle step of single samples: above it the ones that were used least recently are passed.
"""
_MOST_UPDATES = 16
"""Most updates of weights that are known of the time after a step: the latest ones."""


@dataclass(slots=True)
class StepReport:
    """Report of a step.

    `shares` has the instances with samples of the step, `serving` the instances with a link when its last sample
    ended. Of the `tokens` of its samples, `pregenerated` existed before the step; None: the step was not hinted.
    `last` has the samples that ended last, in order. `waits` has the seconds of trainer and weights between the
    run's step before and this one, if they are known.

    A `single` step consists of samples that are requested one by one. It ends once the run has `passed` it.
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
    last: deque[TimedSample] = field(default_factory=lambda: deque(maxlen=_LAST_SAMPLES))
    version: int = 0
    waits: Mapping[str, float] = field(default_factory=dict)
    single: bool = False
    passed: bool = False
    serving: Sequence[str] = ()

    def add(self, ended: TimedSample, ahead: int) -> None:
        """Count a sample that has ended; `ahead` of its tokens existed when the step began."""
        for span in ended.sample.spans:
            if not span.instance_id:
                continue
            share = self.shares.get(span.instance_id)
            if share is None:
                share = self.shares[span.instance_id] = InstanceShare(self.begun_at)
            share.add(span.begin, span.end, span.end_token - span.begin_token)
        self.samples += 1
        self.tokens += ended.tokens
        if self.pregenerated is not None:
            self.pregenerated += ahead
        self.last.append(ended)
        self.ended_at = max(self.ended_at, ended.ended_at)
        self.unfinished -= 1

    def bubbles(self, serving: Iterable[str]) -> dict[str, float]:
        """Return the idle seconds of each instance that had samples of the step or could have had some."""
        names = {*self.shares, *serving}
        ends = {name: share.end for name, share in self.shares.items()}
        return {name: max(0.0, self.ended_at - ends.get(name, self.begun_at)) for name in names}

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of the time of the sample that ended last, and of the wait before it."""
        return {**(time_parts(self.last[-1]) if self.last else {}), **self.waits}


@dataclass(slots=True)
class _LastStep:
    """Step of a run that ended last, and the updates of weights since then, from their begin to their end.

    The run is `single` unless it has submitted batches.
    """

    step: int
    version: int
    ended_at: float
    single: bool = False
    updates: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_UPDATES))


class IdleTimeBook:
    """Steps in work, and the last step of each run. Batches of the same step count as one while they overlap.

    Nothing says when a step of single samples ends. It lasts until a sample of the run belongs to another step, or
    the run publishes weights. Single samples of a run that submits batches belong to no step.
    """

    def __init__(self) -> None:
        # By run and step.
        self._steps: dict[str, dict[int, StepReport]] = {}
        # Run and step of the steps of single samples without work, the one that was used last at the end.
        self._idle: OrderedDict[tuple[str, int], None] = OrderedDict()
        # By run, the one that ended last at the end.
        self._over: OrderedDict[str, _LastStep] = OrderedDict()

    def begin(
        self,
        run_id: str,
        step: int,
        samples: int,
        now: float,
        pregenerated: int | None = None,
        version: int = 0,
        *,
        single: bool = False,
    ) -> list[StepReport]:
        """Begin `samples` samples of a step, `pregenerated` tokens of which exist (None: it was not hinted).

        Returns the reports of the steps of single samples that this ends.
        """
        if not samples:
            return []
        report = self._steps.get(run_id, {}).get(step)
        reports = [] if single and report is not None else self.pass_on(run_id, step)
        if report is None:
            waits = self._waits(run_id, step, version, now)
            report = StepReport(run_id, step, now, now, version=version, waits=waits)
            self._steps.setdefault(run_id, {})[step] = report
        self._idle.pop((run_id, step), None)
        report.unfinished += samples
        report.single = single
        if pregenerated is not None:
            report.pregenerated = pregenerated + (report.pregenerated or 0)
        return reports

    def begin_single(
        self, run_id: str, step: int, now: float, *, hinted: bool, version: int = 0, resumed: bool = False
    ) -> tuple[bool, list[StepReport]]:
        """Begin a single sample of a step, `resumed` if it continues tokens of an earlier request.

        Returns:
            True if it belongs to a step, whose `end` or `drop` is called then: no sample of a run that submits
            batches does, and no late or resumed one of a step that is not in work. And the reports of the steps
            that this ends.
        """
        own, over = self._steps.get(run_id, {}), self._over.get(run_id)
        batches = any(not each.single for each in own.values()) or (over is not None and not over.single)
        # An update of the weights ends a step, and its aborted samples come again with its number.
        late = step not in own and (resumed or any(each > step and own[each].unfinished > 0 for each in own))
        if batches or late:
            return False, []
        reports = self.begin(run_id, step, 1, now, 0 if hinted else None, version, single=True)
        # Two, so that their number falls again; not all at once: a report takes time on the event loop.
        surplus = max(0, min(2, len(self._idle) - _MOST_RUNS))
        for run, _ in list(islice(self._idle, surplus)):
            reports += self.pass_on(run)
        return True, reports

    def pass_on(self, run_id: str, step: int | None = None) -> list[StepReport]:
        """End a run's steps of single samples, except `step`; return the reports of those without work.

        The others end with the last of their samples.
        """
        reports = list[StepReport]()
        for each, report in sorted(self._steps.get(run_id, {}).items()):
            if report.single and each != step:
                report.passed = True
                if self._close(run_id, each) is not None:
                    reports.append(report)
        return reports

    def end(
        self, run_id: str, step: int, ended: TimedSample, ahead: int = 0, serving: Sequence[str] = ()
    ) -> StepReport | None:
        """Record the end of a sample; return the report if it was the last sample of the step.

        `ahead` of its tokens existed when the step began. The instances `serving` have a link now; when the report
        of a step of single samples is made, it may be others.
        """
        report = self._steps.get(run_id, {}).get(step)
        if report is None:
            return None
        report.add(ended, ahead)
        report.serving = serving
        return self._close(run_id, step)

    def drop(self, run_id: str, step: int, samples: int, *, single: bool = False) -> StepReport | None:
        """Give up samples of a step; return the report if it was `single` and the last sample in work."""
        report = self._steps.get(run_id, {}).get(step)
        if report is None:
            return None
        report.unfinished -= samples
        closed = self._close(run_id, step)
        if not single and report.unfinished <= 0:
            # Its end is unknown, so the time until the next step is, too.
            self._over.pop(run_id, None)
            return None
        return closed

    def forget(self, run_id: str) -> list[StepReport]:
        """Forget a run, since another may begin under its name; return the reports of the steps that this ends."""
        reports = self.pass_on(run_id)
        self._over.pop(run_id, None)
        return reports

    def updated(self, run_id: str, begin: float, end: float) -> None:
        """Record an update of a run's weights, from its begin to its end in unix seconds."""
        if run_id in self._over:
            self._over[run_id].updates.append((begin, end))

    def _waits(self, run_id: str, step: int, version: int, now: float) -> dict[str, float]:
        """Return the seconds of trainer and weights until a step begins; none if a restarted trainer begins it."""
        over = self._over.get(run_id)
        if over is None or run_id in self._steps:
            return {}
        if step < over.step or (step == over.step and version != over.version):
            return {}
        whole = max(0.0, now - over.ended_at)
        updating = sum(max(0.0, min(now, end) - max(over.ended_at, begin)) for begin, end in over.updates)
        weights = min(whole, updating)
        return {"trainer": whole - weights, "weights": weights}

    def _close(self, run_id: str, step: int) -> StepReport | None:
        """Return the report of a step that is over and had samples; it is the last step of its run then."""
        own = self._steps[run_id]
        report = own[step]
        if report.unfinished > 0:
            return None
        if report.single and not report.passed:
            self._idle[run_id, step] = None
            return None
        self._idle.pop((run_id, step), None)
        del own[step]
        if not own:
            del self._steps[run_id]
        former = self._over.get(run_id)
        single = report.single and (former is None or former.single)
        if not report.samples:
            # As in `drop`. Runs that submit batches have other steps to measure the time from.
            if single:
                self._over.pop(run_id, None)
            return None
        self._over[run_id] = _LastStep(step, report.version, report.ended_at, single)
        self._over.move_to_end(run_id)
        if len(self._over) > _MOST_RUNS:
            self._over.popitem(last=False)
        return report


def step_record(report: StepReport, bubbles: Mapping[str, float], version: int) -> DecisionRecord:
    """Return the decision-log entry of a step, given the idle seconds of its instances and its policy version."""
    seconds, idle = report.ended_at - report.begun_at, sum(bubbles.values())
    share = idle / (seconds * len(bubbles)) if seconds > 0 and bubbles else 0.0
    words = (
        f"step {report.step}: {report.samples} samples of {report.tokens} tokens in {seconds:.1f} s; "
        f"{share:.0%} of the time of {len(bubbles)} instances was bubbles"
        + ("; nobody announced it" if report.pregenerated is None else "")
    )
    shares = report.shares.values()
    width = max((each.width for each in shares), default=seconds)
    for each in shares:
        each.widen(width)
    counts = [each.counts(report.ended_at) for each in shares]
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
        "rows": [_row(name, report.shares.get(name), bubbles[name]) for name in _shown(bubbles)],
        "all": [sum(each) for each in zip_longest(*counts, fillvalue=0)],
        "last": [path_of(each) for each in reversed(report.last)],
    }
    return DecisionRecord(STEP_KIND, words, 0.0, details, report.ended_at, report.run_id)


def _shown(bubbles: Mapping[str, float]) -> list[str]:
    """Return the instances that an entry shows: all, or those that idled least and those that idled most."""
    if len(bubbles) <= SHOWN:
        return sorted(bubbles)
    ordered = sorted(bubbles, key=lambda name: (bubbles[name], name))
    return ordered[: SHOWN // 2] + ordered[-SHOWN // 2 :]


def _row(name: str, share: InstanceShare | None, bubble: float) -> list[Any]:
    if share is None:
        return [name, None, None, 0, 0, round(bubble, 3), []]
    times = round(share.begin, 3), round(share.end, 3)
    return [name, *times, share.samples, share.tokens, round(bubble, 3), share.counts(share.end)]
