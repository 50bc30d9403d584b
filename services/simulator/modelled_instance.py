"""Instance of a simulated cluster: its batch of samples, its spans of equal steps, and figures of a step. Pure.

Samples join or leave between steps only: a change first cuts the span of steps after the one under way. Times are
in seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from statistics import fmean

from services.gateway.scheduler.placement import InstanceSlots
from services.simulator.device_tables import DeviceTable
from services.simulator.step_decider import StepDecider, StepDecision

# A sample this many tokens short of its end has reached it: counters are sums of fractions.
_ROUNDING = 1e-6
# Most growth of the context within a span, as a share.
_GROWTH = 0.15
# Most prompt tokens that a step prefills.
_CHUNK = 8192
# Share of the KV that stays free when a sample joins, so that running samples can grow.
_SPARE = 0.05


@dataclass(slots=True, eq=False)
class SimulatedSample:
    """A sample. Lengths are in tokens; its own draft has the first `covered` tokens of the response.

    `decode_steps` counts the steps that it took part in. `lease` is 0 unless the sample is pre-generated.
    """

    prompt: int
    slot: int
    prompt_tokens: int
    length: int
    number: int = 0
    covered: int = 0
    generated: float = 0.0
    decode_steps: int = 0
    lease: int = 0
    predicted: float = 0.0
    ends: int = 0
    ended_at: float = 0.0

    @property
    def kind(self) -> str:
        """Current cohort: background, covered by its own draft, or open."""
        if self.lease:
            return "background"
        return "covered" if self.generated + _ROUNDING < min(self.covered, self.length) else "open"

    @property
    def context(self) -> float:
        """Tokens of prompt and response."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True, eq=False)
class _Cohort:
    progress: float = 0.0
    steps: int = 0
    # Context of all members at a counter of 0.
    base: float = 0.0
    # Counter and steps when a member joined, and the running number of its joining.
    members: dict[SimulatedSample, tuple[float, int, int]] = field(default_factory=dict)
    # (counter at which something changes for a member, running number of its joining, the member)
    changes: list[tuple[float, int, SimulatedSample]] = field(default_factory=list)
    joined: int = 0

    def add(self, sample: SimulatedSample, until: int) -> None:
        self.joined += 1
        self.members[sample] = (self.progress, self.steps, self.joined)
        self.base += sample.context - self.progress
        heapq.heappush(self.changes, (self.progress + until - sample.generated, self.joined, sample))

    def remove(self, sample: SimulatedSample) -> None:
        progress, steps, _ = self.members.pop(sample)
        self.base -= sample.context - progress
        sample.generated += self.progress - progress
        sample.decode_steps += self.steps - steps
        if not self.members:
            self.progress, self.base = 0.0, 0.0
            self.changes.clear()

    def next_change(self) -> float:
        """Return the tokens until something changes for a member."""
        while True:
            change, joined, sample = self.changes[0]
            if sample in self.members and self.members[sample][2] == joined:
                return change - self.progress
            heapq.heappop(self.changes)

    @property
    def context(self) -> float:
        return self.base + len(self.members) * self.progress


class SampleBatch:
    """Running samples by cohort, advanced by many steps at once.

    Samples with the same sources of drafts are a cohort: each step brings every one of them the same tokens, on
    average. So a cohort has one counter of tokens, its members are ordered by the count at which they end, and a
    step costs nothing.
    """

    def __init__(self) -> None:
        self._cohorts: dict[str, _Cohort] = {}
        self._of: dict[SimulatedSample, str] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, sample: SimulatedSample) -> bool:
        return sample in self._of

    @property
    def samples(self) -> list[SimulatedSample]:
        """The samples in the order in which they joined; counters are as of joining (see `generated`)."""
        return list(self._of)

    @property
    def context(self) -> float:
        """Tokens of all prompts and responses."""
        return sum(each.context for each in self._cohorts.values() if each.members)

    def counts(self) -> dict[str, int]:
        """Return the samples of each cohort that has any."""
        return {kind: len(each.members) for kind, each in sorted(self._cohorts.items()) if each.members}

    def add(self, sample: SimulatedSample) -> None:
        """Let a sample join."""
        kind = sample.kind
        until = min(sample.covered, sample.length) if kind == "covered" else sample.length
        self._cohorts.setdefault(kind, _Cohort()).add(sample, until)
        self._of[sample] = kind

    def remove(self, sample: SimulatedSample) -> None:
        """Remove a sample, and update its counters."""
        self._cohorts[self._of.pop(sample)].remove(sample)

    def kind(self, sample: SimulatedSample) -> str:
        """Return the cohort of a sample."""
        return self._of[sample]

    def generated(self, sample: SimulatedSample) -> float:
        """Return the response tokens of a sample by now."""
        cohort = self._cohorts[self._of[sample]]
        return sample.generated + cohort.progress - cohort.members[sample][0]

    def steps_to_change(self, tokens: dict[str, float]) -> int:
        """Return the steps until a sample or its draft ends; `tokens` are the tokens per step of each cohort."""
        return min(
            max(1, ceil((cohort.next_change() - _ROUNDING) / tokens[kind]))
            for kind, cohort in self._cohorts.items()
            if cohort.members
        )

    def advance(self, steps: int, tokens: dict[str, float]) -> list[SimulatedSample]:
        """Advance by `steps`; remove the samples that have ended and return them, in the order of their ends."""
        changed = []
        for kind, cohort in self._cohorts.items():
            if not cohort.members:
                continue
            cohort.progress += steps * tokens[kind]
            cohort.steps += steps
            while cohort.members and cohort.next_change() <= _ROUNDING:
                sample = cohort.changes[0][2]
                self.remove(sample)
                changed.append(sample)
        ended = []
        for sample in changed:
            if sample.generated + _ROUNDING >= sample.length:
                sample.generated = float(sample.length)
                ended.append(sample)
            else:
                self.add(sample)
        return ended


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Steps of the same samples that take `seconds` each."""

    began: float
    seconds: float
    steps: int
    decision: StepDecision

    @property
    def ends(self) -> float:
        """Time at which the last step ends."""
        return self.began + self.steps * self.seconds


@dataclass(slots=True)
class DecodingTotals:
    """Totals of a step over all instances: steps, seconds, verified drafts, drafted and accepted tokens."""

    steps: int = 0
    seconds: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    preempted: int = 0

    def clear(self) -> None:
        """Start a new step."""
        self.steps = self.preempted = 0
        self.seconds = self.drafts = self.drafted = self.accepted = 0.0


@dataclass(eq=False)
class ModelledInstance:
    """One instance. `clock` is the end of its last span; `span` the steps since then, None while it is idle."""

    name: str
    decider: StepDecider
    slots: InstanceSlots
    max_running: int
    totals: DecodingTotals
    batch: SampleBatch = field(default_factory=SampleBatch)
    waiting: deque[SimulatedSample] = field(default_factory=deque)
    clock: float = 0.0
    span: StepSpan | None = None
    steps: int = 0
    busy_until: float = 0.0
    """Time when its last sample of the step ended."""
    background: bool = False
    leaving: list[Callable[[], None]] = field(default_factory=list)
    """Actions for the end of the step under way."""
    # Prompt tokens to prefill before the next step.
    _prefill: int = 0

    @property
    def device(self) -> DeviceTable:
        """Step times."""
        return self.decider.device

    @property
    def samples(self) -> int:
        """Samples that run or wait."""
        return len(self.batch) + len(self.waiting)

    def prefill(self, tokens: int) -> None:
        """Prefill `tokens` tokens before the next step."""
        self._prefill += tokens

    def cut(self, now: float) -> None:
        """Shorten the span to end with the step under way."""
        span = self.span
        if span is None:
            return
        done = max(0, floor((now - span.began) / span.seconds + 1e-9))
        if done + 1 < span.steps:
            self.span = StepSpan(span.began, span.seconds, max(done + 1, 1), span.decision)

    def steps_by(self, now: float) -> int:
        """Return the number of steps that have ended by `now`."""
        return self.steps + self._done_by(now)

    def generated(self, sample: SimulatedSample, now: float) -> float:
        """Return the response tokens of a sample of this instance at `now`."""
        if sample not in self.batch:
            return sample.generated
        more = 0.0
        if self.span is not None:
            more = self._done_by(now) * self.span.decision.tokens[self.batch.kind(sample)]
        return min(self.batch.generated(sample) + more, float(sample.length))

    def _done_by(self, now: float) -> int:
        span = self.span
        if span is None:
            return 0
        return min(span.steps, max(0, floor((now - span.began) / span.seconds + 1e-9)))

    def finish_span(self) -> list[SimulatedSample]:
        """Complete the steps of the span; return the samples that have ended."""
        span = self.span
        assert span is not None, "an instance that idles has no span"
        counts = self.batch.counts()
        ended = self.batch.advance(span.steps, span.decision.tokens)
        if not self.background:
            totals = self.totals
            totals.steps += span.steps
            totals.seconds += span.steps * span.seconds
            for kind, count in counts.items():
                drafted = span.decision.drafted[kind]
                totals.drafts += span.steps * count * (drafted > 0)
                totals.drafted += span.steps * count * drafted
                totals.accepted += span.steps * count * (span.decision.tokens[kind] - 1)
        self.steps += span.steps
        self.clock, self.span = span.ends, None
        for each in ended:
            each.ended_at, each.ends = self.clock, each.ends + 1
        return ended

    def begin_span(self) -> None:
        """Admit waiting samples that fit, and begin the next steps if there are any samples."""
        self._admit()
        counts = self.batch.counts()
        if not counts:
            return
        n, context = len(self.batch), self.batch.context
        decision = self.decider.decide(counts, context / n)
        growth = sum(count * decision.tokens[kind] for kind, count in counts.items())
        # Steps for which the KV has room and the step time stays about the same.
        most = min((self.device.kv_tokens - context) / growth, _GROWTH * context / growth)
        steps = min(self.batch.steps_to_change(decision.tokens), max(1, floor(most)))
        mean = context + growth * (steps - 1) / 2
        rows = n + round(sum(count * decision.drafted[kind] for kind, count in counts.items()))
        seconds = self.device.seconds(n, rows, mean)
        if decision.passes:
            seconds += decision.passes * self.decider.pass_seconds(decision.drafted_for, mean / n)
        began = self.clock + self._prefill_seconds()
        self.span = StepSpan(began, seconds, steps, decision)

    def _admit(self) -> None:
        """Admit waiting samples while there is room in batch and KV; if KV is short, preempt the latest ones."""
        room = self.device.kv_tokens - self.batch.context
        while self.waiting and len(self.batch) < self.max_running:
            sample = self.waiting[0]
            if len(self.batch) and sample.context > room - _SPARE * self.device.kv_tokens:
                break
            self.waiting.popleft()
            self.batch.add(sample)
            room -= sample.context
        while room < len(self.batch) * self.decider.most_tokens and len(self.batch) > 1:
            last = self.batch.samples[-1]
            self.batch.remove(last)
            self.waiting.appendleft(last)
            self.prefill(round(last.context))
            self.totals.preempted += not self.background
            room = self.device.kv_tokens - self.batch.context

    def _prefill_seconds(self) -> float:
        chunks, rest = divmod(self._prefill, _CHUNK)
        self._prefill = 0
        found = chunks * self.device.seconds(1, _CHUNK, 0.0, verifies=False) if chunks else 0.0
        return found + (self.device.seconds(1, rest, 0.0, verifies=False) if rest else 0.0)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Figures of a step. Times are in seconds, lengths in tokens.

    A bubble is the time from an instance's last sample to the end of the step.

    `acceptance_length` counts the tokens of a verified draft, the policy's own included; `draft_length` the drafted
    tokens. `covered` counts the pre-generated tokens of a sample. `busy` is the share of instance time with
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
        """Tokens per second of the whole cluster."""
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
