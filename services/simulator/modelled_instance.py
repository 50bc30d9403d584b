"""An instance of a simulated cluster: its batch, and the span of like steps that it is in.

Nothing joins or leaves in mid-step: who wants to waits for the end of the step that is under way, where the span is
then cut. Times are in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor

from services.gateway.dispatch.placement import InstanceSlots
from services.simulator.device_tables import DeviceTable
from services.simulator.sample_batch import SampleBatch, SimulatedSample
from services.simulator.step_decider import StepDecider, StepDecision

# Most growth of the context within a span, as a share.
_GROWTH = 0.15
# Tokens of a prefill in one step, and rows beyond which a device's table ends.
_CHUNK = 8192
# Share of the KV that stays free when a sample joins, for those that run to grow.
_SPARE = 0.05


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Steps of the same samples, that take `seconds` each."""

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
    """Totals of instances, of samples of a step: steps, seconds, drafts verified, tokens drafted and accepted."""

    steps: int = 0
    seconds: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    preempted: int = 0

    def clear(self) -> None:
        """Begin a step."""
        self.steps = self.preempted = 0
        self.seconds = self.drafts = self.drafted = self.accepted = 0.0


@dataclass(eq=False)
class ModelledInstance:
    """Instance. `clock` is the end of its last step; `span` what it does since, None while it idles."""

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
    """End of its last sample of the step."""
    background: bool = False
    leaving: list[Callable[[], None]] = field(default_factory=list)
    """What is to be done at the end of the step under way."""
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
        """Compute so many tokens before the next step."""
        self._prefill += tokens

    def cut(self, now: float) -> None:
        """End the span with the step that is under way now."""
        span = self.span
        if span is None:
            return
        done = max(0, floor((now - span.began) / span.seconds + 1e-9))
        if done + 1 < span.steps:
            self.span = StepSpan(span.began, span.seconds, max(done + 1, 1), span.decision)

    def steps_by(self, now: float) -> int:
        """Return the steps that have ended by now."""
        return self.steps + self._done_by(now)

    def generated(self, sample: SimulatedSample, now: float) -> float:
        """Return the response tokens that a sample here has by now."""
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
        """Do the steps of the span; return the samples that have ended."""
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
        """Admit what waits and fits, and begin the next steps, if there is anything to do."""
        self._admit()
        counts = self.batch.counts()
        if not counts:
            return
        n, context = len(self.batch), self.batch.context
        decision = self.decider.decide(counts, context / n)
        growth = sum(count * decision.tokens[kind] for kind, count in counts.items())
        # Those that fit in the KV, and in which steps do not become much longer.
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
        """Let waiting samples join while seats and KV last; where KV is short, preempt those that joined last."""
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
        found = chunks * self.device.seconds(1, _CHUNK, 0.0) if chunks else 0.0
        return found + (self.device.seconds(1, rest, 0.0) if rest else 0.0)
