"""What the fleet did for each step of each run, put together from the reports of its instances. Pure.

An instance reports totals since it began a step, so a report that is lost or comes twice does no harm. A step is
over when a later one of its run is reported, or when nothing has changed for a while. What comes after that (of an
instance that was paused, say) is told as one more end of the same step.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.policy.ladder import Acceptance

MAX_STEPS = 64
"""Steps that are remembered, over all runs."""

_LATE = 0.25
"""Share of the settling time that a step is waited for when a later one has begun."""

StepKey = tuple[str, int]
"""(run_id, step)"""


@dataclass(slots=True)
class StepTotals:
    """Sums over engine steps in which samples of the step decoded. Times in seconds.

    `reasons` counts those steps by why they were planned as they were; `predicted_gain` sums the predicted speedup
    over plain decoding less 1; `drafts` is by origin of the tokens.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    planned_tokens: int = 0
    expected_tokens: float = 0.0
    predicted_gain: float = 0.0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    drafts: dict[str, Acceptance] = field(default_factory=dict)
    mode: str = ""

    @property
    def engine_steps(self) -> int:
        """Engine steps in all."""
        return sum(self.reasons.values())

    @property
    def acceptance(self) -> Acceptance:
        """Of all drafts together."""
        return sum(self.drafts.values(), Acceptance(0, 0, 0))

    def plus(self, other: StepTotals, sign: int = 1) -> StepTotals:
        """The sum, or with sign -1 the difference."""
        names = {*self.drafts, *other.drafts}
        nothing = Acceptance(0, 0, 0)
        reasons = Counter(self.reasons)
        for reason, count in other.reasons.items():
            reasons[reason] += sign * count
        return StepTotals(
            +reasons,
            self.planned_tokens + sign * other.planned_tokens,
            self.expected_tokens + sign * other.expected_tokens,
            self.predicted_gain + sign * other.predicted_gain,
            self.predicted_seconds + sign * other.predicted_seconds,
            self.measured_seconds + sign * other.measured_seconds,
            {
                name: _combined(self.drafts.get(name, nothing), other.drafts.get(name, nothing), sign)
                for name in sorted(names)
            },
            self.mode or other.mode,
        )


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step is over, or more of it has become known. `instances` took part."""

    run_id: str
    step: int
    totals: StepTotals
    instances: int


@dataclass(slots=True)
class _Entry:
    by_instance: dict[tuple[str, int], StepTotals] = field(default_factory=dict)
    told: StepTotals = field(default_factory=StepTotals)
    changed_at: float = 0.0

    def totals(self) -> StepTotals:
        whole = StepTotals()
        for totals in self.by_instance.values():
            whole = whole.plus(totals)
        return whole


class StepBook:
    """Collects reports; `settle` is how many seconds without a change end a step."""

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._entries: OrderedDict[StepKey, _Entry] = OrderedDict()

    def report(
        self, instance: tuple[str, int], steps: Iterable[tuple[StepKey, StepTotals]], now: float
    ) -> None:
        """What an instance, by id and epoch, says of steps."""
        for key, totals in steps:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(changed_at=now)
                while len(self._entries) > MAX_STEPS:
                    self._entries.popitem(last=False)
            if entry.by_instance.get(instance) != totals:
                entry.by_instance[instance] = totals
                entry.changed_at = now

    def ended(self, now: float) -> list[StepEnd]:
        """Steps that are over and of which something has not been told yet, earliest first."""
        newest: dict[str, int] = {}
        for run_id, step in self._entries:
            newest[run_id] = max(newest.get(run_id, step), step)
        found = []
        for (run_id, step), entry in self._entries.items():
            # A later step is known: what is missing of this one is on its way.
            wait = self._settle if step == newest[run_id] else self._settle * _LATE
            if now - entry.changed_at < wait:
                continue
            totals = entry.totals()
            rest = totals.plus(entry.told, -1)
            if rest.engine_steps > 0:
                entry.told = totals
                found.append(StepEnd(run_id, step, rest, len(entry.by_instance)))
        return sorted(found, key=lambda each: (each.run_id, each.step))


def _combined(a: Acceptance, b: Acceptance, sign: int) -> Acceptance:
    return Acceptance(
        a.verifications + sign * b.verifications,
        a.drafted + sign * b.drafted,
        a.accepted + sign * b.accepted,
    )
