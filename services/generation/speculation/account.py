"""Account of speculation by run and step: how engine steps were planned and how drafts were accepted. Pure.

An engine step is booked for the run and step of its first sample; batches of a synchronous run have no others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.contracts.step_totals import MOST_COUNTED, Acceptance, StepKey, StepTotals
from services.generation.speculation.modes.decision import PlanDecision

_MAX_STEPS, _MAX_SWITCHES = 8, 64


@dataclass(frozen=True, slots=True)
class SpeculationSwitch:
    """Switch of the toggle within a step; `time` is in Unix seconds, `serial` counts switches."""

    serial: int
    time: float
    on: bool
    speedup: float
    requests: int
    run_id: str
    step: int


class SpeculationAccount:
    """Totals of the latest steps, and the latest switches of the toggle. `begin` says which step is booked for."""

    def __init__(self) -> None:
        self._steps: OrderedDict[StepKey, StepTotals] = OrderedDict()
        self._switches: deque[SpeculationSwitch] = deque(maxlen=_MAX_SWITCHES)
        self._serial = 0
        self._key: StepKey | None = None
        # What is of no step of a run is booked on an account that nobody sees.
        self._totals = StepTotals()
        # A step that begins with plain decoding did not switch speculation off.
        self._on = False
        # By source, verifications by (drafted tokens, accepted tokens) not booked yet.
        self._verified: dict[str, Counter[tuple[int, int]]] = {}

    def begin(self, key: StepKey | None) -> bool:
        """Book what follows for this step of a run, or for none; return True if it is another than before."""
        if key == self._key:
            return False
        self._settle()
        self._key, self._on = key, False
        self._totals = StepTotals() if key is None else self._steps.setdefault(key, StepTotals())
        while len(self._steps) > _MAX_STEPS:
            self._steps.popitem(last=False)
        return True

    def planned(self, decision: PlanDecision, mode: str) -> None:
        """Book the plan of an engine step."""
        totals = self._totals
        totals.reasons[decision.reason] += 1
        totals.planned_tokens += decision.tokens
        totals.expected_tokens += decision.expected
        totals.predicted_gain += decision.speedup - 1.0
        totals.mode = mode

    def toggled(self, on: bool, speedup: float, requests: int, now: float) -> None:
        """Book the state of the toggle; it is a switch if it changed within the step."""
        if on != self._on and self._key is not None:
            self._serial += 1
            self._switches.append(SpeculationSwitch(self._serial, now, on, speedup, requests, *self._key))
        self._on = on

    def timed(self, predicted: float, measured: float) -> None:
        """Book predicted and measured seconds of an engine step."""
        self._totals.predicted_seconds += predicted
        self._totals.measured_seconds += measured

    def verified(self, source: str, drafted: int, accepted: int) -> None:
        """Book the outcome of one draft."""
        counted = self._verified.get(source)
        if counted is None:
            counted = self._verified[source] = Counter()
        counted[drafted, accepted] += 1

    def steps(self) -> Iterable[tuple[StepKey, StepTotals]]:
        """Return the latest steps, oldest first."""
        self._settle()
        return self._steps.items()

    def switches(self, after: int) -> list[SpeculationSwitch]:
        """Return the switches with a serial number above `after`."""
        return [each for each in self._switches if each.serial > after]

    def _settle(self) -> None:
        """Book the counted outcomes: there is no time to build an `Acceptance` for each draft of each step."""
        drafts = self._totals.drafts
        for source, counted in self._verified.items():
            drafts[source] = drafts.get(source, Acceptance()) + _acceptance(counted)
        self._verified.clear()


def _acceptance(counted: Counter[tuple[int, int]]) -> Acceptance:
    drafted, accepted = [0] * (MOST_COUNTED + 1), [0] * (MOST_COUNTED + 1)
    for (proposed, kept), count in counted.items():
        drafted[min(proposed, MOST_COUNTED)] += count
        accepted[min(kept, MOST_COUNTED)] += count
    return Acceptance(
        counted.total(),
        sum(proposed * count for (proposed, _), count in counted.items()),
        sum(kept * count for (_, kept), count in counted.items()),
        tuple(drafted),
        tuple(accepted),
    )
