"""The account of speculation, by run and step: how engine steps were planned and what became of drafts. Pure.

An engine step counts for the run and step of its first sample: batches of a synchronous step have no others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.generation.drafting.planner import Decision
from services.policy.ladder import Acceptance
from services.policy.steps import StepKey, StepTotals

_MAX_STEPS, _MAX_SWITCHES = 8, 64


@dataclass(frozen=True, slots=True)
class Switched:
    """Speculation was turned on or off within a step. `time` is in unix seconds."""

    serial: int
    time: float
    on: bool
    speedup: float
    requests: int
    run_id: str
    step: int


class Ledger:
    """The latest steps and switches. `begin` says for which step everything until the next `begin` counts."""

    def __init__(self) -> None:
        self._steps: OrderedDict[StepKey, StepTotals] = OrderedDict()
        self._switches: deque[Switched] = deque(maxlen=_MAX_SWITCHES)
        self._serial = 0
        self._key: StepKey | None = None
        self._on: bool | None = None
        # Verifications, tokens drafted and accepted, by source, that are not booked yet.
        self._verified: dict[str, list[int]] = {}

    def begin(self, key: StepKey | None) -> bool:
        """The coming engine step is of this step of a run, or of none; whether that is another than before."""
        if key == self._key:
            return False
        self._settle()
        self._key = key
        self._on = None
        return True

    def planned(self, decision: Decision, mode: str) -> None:
        """The engine step was planned so."""
        totals = self._totals()
        if totals is None:
            return
        totals.reasons[decision.reason] += 1
        totals.planned_tokens += decision.tokens
        totals.expected_tokens += decision.expected
        totals.predicted_gain += decision.speedup - 1.0
        totals.mode = mode

    def switched(self, on: bool, speedup: float, requests: int, now: float) -> None:
        """The toggle stands so; noted when that is new in this step."""
        if on == self._on:
            return
        # That a step begins with plain decoding is no switch.
        news, self._on = on or self._on is not None, on
        if not news or self._key is None:
            return
        self._serial += 1
        self._switches.append(Switched(self._serial, now, on, speedup, requests, *self._key))

    def timed(self, predicted: float, measured: float) -> None:
        """The engine step took so many seconds."""
        totals = self._totals()
        if totals is not None:
            totals.predicted_seconds += predicted
            totals.measured_seconds += measured

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """A draft was verified."""
        counted = self._verified.get(source)
        if counted is None:
            counted = self._verified[source] = [0, 0, 0]
        counted[0] += 1
        counted[1] += drafted
        counted[2] += accepted

    def steps(self) -> Iterable[tuple[StepKey, StepTotals]]:
        """The latest steps, oldest first."""
        self._settle()
        return self._steps.items()

    def switches(self, after: int) -> list[Switched]:
        """Switches with a serial number above `after`."""
        return [each for each in self._switches if each.serial > after]

    def _settle(self) -> None:
        """Book what was verified: between two steps there is no time to do so for each draft."""
        totals = self._totals() if self._verified else None
        if totals is not None:
            for source, counted in self._verified.items():
                totals.drafts[source] = totals.drafts.get(source, Acceptance(0, 0, 0)) + Acceptance(*counted)
        self._verified.clear()

    def _totals(self) -> StepTotals | None:
        if self._key is None:
            return None
        totals = self._steps.get(self._key)
        if totals is None:
            totals = self._steps[self._key] = StepTotals()
            while len(self._steps) > _MAX_STEPS:
                self._steps.popitem(last=False)
        return totals
