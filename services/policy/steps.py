"""Statistics of each training step of each run, merged from the reports of instances. Pure.

An instance reports totals since it began a step, so lost and repeated reports do no harm. A step ends when a later
one of its run is reported, or when nothing has changed for a while. Totals that arrive after that, of an instance
that was paused for example, make one more end of the same step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.contracts.step_totals import StepKey, StepTotals

MAX_STEPS = 64
"""Most steps that are remembered, over all runs."""

_LATE = 0.25
"""Share of the settling time for which a step is waited for once a later one has begun."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """End of a step, with the totals not returned before; `instances` took part."""

    run_id: str
    step: int
    totals: StepTotals
    instances: int


@dataclass(slots=True)
class _Entry:
    by_instance: dict[tuple[str, int], StepTotals] = field(default_factory=dict)
    returned: StepTotals = field(default_factory=StepTotals)
    changed_at: float = 0.0

    def totals(self) -> StepTotals:
        whole = StepTotals()
        for totals in self.by_instance.values():
            whole = whole.plus(totals)
        return whole


class StepBook:
    """Collects reports. A step ends after `settle` seconds without a change."""

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._entries: OrderedDict[StepKey, _Entry] = OrderedDict()

    def report(
        self, instance: tuple[str, int], steps: Iterable[tuple[StepKey, StepTotals]], now: float
    ) -> None:
        """Take in the totals of steps that an instance, named by id and epoch, reports."""
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
        """Return the ends of steps that were not returned before, earliest step first."""
        newest: dict[str, int] = {}
        for run_id, step in self._entries:
            newest[run_id] = max(newest.get(run_id, step), step)
        found = []
        for (run_id, step), entry in self._entries.items():
            # With a later step known, the last reports of this one are on their way.
            wait = self._settle if step == newest[run_id] else self._settle * _LATE
            if now - entry.changed_at < wait:
                continue
            totals = entry.totals()
            new = totals.plus(entry.returned, -1)
            if new.engine_steps > 0:
                entry.returned = totals
                found.append(StepEnd(run_id, step, new, len(entry.by_instance)))
        return sorted(found, key=lambda each: (each.run_id, each.step))
