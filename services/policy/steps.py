"""Merge the statistics of training steps, adapt the cap on draft lengths, and explain decisions. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.internal.v1 import policy_pb2 as pb
from services.contracts.knob_store import Rung
from services.contracts.knobs import Acceptance, KnobScope, LadderKnobs, Setting, StepKey, StepTotals, changes
from services.contracts.modes import PlanReason
from services.platform.redis.decision_log import DecisionRecord

MAX_STEPS = 64
"""Most steps, over all runs, that are remembered although no instance has reported them lately."""
LEAST_VERIFICATIONS = 16
"""Fewest verifications of a step for the ladder to consider it."""
# Share of the settling time after which a step ends once a later one has begun.
_LATE = 0.25
# Intervals between reports for which a step counts as lately reported: instances may miss some reports.
_INTERVALS = 20
# The cap binds if drafts have at least this share of its length on average.
_BINDS = 0.5


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
    reported_at: float = 0.0
    # True while it may have totals that were not returned.
    open: bool = True

    def totals(self) -> StepTotals:
        whole = StepTotals()
        for totals in self.by_instance.values():
            whole = whole.plus(totals)
        return whole


class StepStatistics:
    """Merged reports of steps. A step ends after `settle` seconds without a change.

    An instance reports totals since it began a step, so lost and repeated reports do no harm. A step ends when a
    later one of its run is reported, or when nothing has changed for a while. Totals that arrive after that, from a
    paused instance for example, make one more end of the same step.

    Every report repeats the latest steps of its instance, so these are remembered, however many there are: a step
    that was forgotten would begin anew with the next report.
    """

    def __init__(self, settle: float, interval: float) -> None:
        """Expect a report of each instance every `interval` seconds."""
        self._settle = settle
        # Longer than a step takes to settle.
        self._lately = settle + _INTERVALS * interval
        # The one that was not reported for the longest time first.
        self._entries: OrderedDict[StepKey, _Entry] = OrderedDict()

    def report(
        self, instance: tuple[str, int], steps: Iterable[tuple[StepKey, StepTotals]], now: float
    ) -> None:
        """Record the totals of steps from an instance, which is named by id and epoch."""
        for key, totals in steps:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            entry.reported_at = now
            if entry.by_instance.get(instance) != totals:
                entry.by_instance[instance] = totals
                entry.changed_at, entry.open = now, True
        self._forget(now - self._lately)

    def ended(self, now: float) -> list[StepEnd]:
        """Return the ends of steps since the last call, earliest step first."""
        newest: dict[str, int] = {}
        for run_id, step in self._entries:
            newest[run_id] = max(newest.get(run_id, step), step)
        found = []
        for (run_id, step), entry in self._entries.items():
            # Once a later step has begun, the last reports of this one are under way.
            wait = self._settle if step == newest[run_id] else self._settle * _LATE
            if not entry.open or now - entry.changed_at < wait:
                continue
            totals, entry.open = entry.totals(), False
            new = totals.plus(entry.returned, -1)
            if new.engine_steps > 0:
                entry.returned = totals
                found.append(StepEnd(run_id, step, new, len(entry.by_instance)))
        return sorted(found, key=lambda each: (each.run_id, each.step))

    def _forget(self, before: float) -> None:
        while len(self._entries) > MAX_STEPS:
            key, oldest = next(iter(self._entries.items()))
            if oldest.reported_at >= before:
                return
            del self._entries[key]


@dataclass(frozen=True, slots=True)
class LadderMove:
    """Outcome of a step for the ladder, with the reason."""

    rung: Rung
    moved: bool
    reason: str


def start(knobs: LadderKnobs, draft_cap: int) -> Rung:
    """Return the first rung: the greatest length up to the cap, or else the least."""
    return Rung(max((each for each in knobs.lengths if each <= draft_cap), default=knobs.lengths[0]))


def climb(knobs: LadderKnobs, rung: Rung, step: Acceptance) -> LadderMove:
    """Move a run on its ladder by the acceptance of a finished step, after EfficientRollout (section 4.3).

    The cap moves along a ladder of lengths. The measured block efficiency of a step is compared with its ceiling,
    drafted + 1 per verification: close to the ceiling the cap rises, far below it falls, each after `patience`
    steps in a row that agree.

    The ceiling of the paper is the cap + 1, because it always drafts that many tokens. A planner drafts fewer
    where fewer pay, so here the ceiling is the number of drafted tokens, and a cap that drafts do not come close
    to is not raised.

    Args:
        knobs: the ladder; a cap that is not on it, because it was changed, is moved onto it first.
        rung: position of the run.
        step: acceptance of the step's drafts.
    """
    if rung.cap not in knobs.lengths:
        rung = start(knobs, rung.cap)
    if step.verifications < LEAST_VERIFICATIONS:
        return LadderMove(rung, False, f"{step.verifications} verifications say nothing")
    place, full = knobs.lengths.index(rung.cap), step.fullness
    said = f"block efficiency {step.block_efficiency:.2f} is {full:.0%} of its ceiling"
    side = _side(knobs, rung, step)
    if side == 0:
        return LadderMove(replace(rung, streak=0), False, said)
    streak = rung.streak + side if rung.streak * side > 0 else side
    to = place + side
    if not 0 <= to < len(knobs.lengths):
        return LadderMove(replace(rung, streak=0), False, f"{said}; the ladder ends at {rung.cap}")
    if abs(streak) < knobs.patience:
        return LadderMove(
            replace(rung, streak=streak), False, f"{said}; {abs(streak)} of {knobs.patience} steps"
        )
    return LadderMove(Rung(knobs.lengths[to]), True, f"{said} in {abs(streak)} steps")


def _side(knobs: LadderKnobs, rung: Rung, step: Acceptance) -> int:
    binds = step.drafted >= _BINDS * rung.cap * step.verifications
    if step.fullness >= knobs.up and binds:
        return 1
    return -1 if step.fullness <= knobs.down else 0


KNOBS, SPECULATION, DRAFT_CAP, TOGGLE = "knobs", "speculation", "draft_cap", "toggle"
"""Kinds of decision of this service."""


def knobs_set(
    scope: KnobScope, before: Setting, after: Setting, revision: int, pending: Sequence[str], now: float
) -> DecisionRecord:
    """Explain a change of knobs."""
    changed = list(changes(before, after))
    words = ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in changed)
    details: dict[str, Any] = {
        "scope": scope.key,
        "revision": revision,
        "knobs": dict(after),
        "pending": list(pending),
    }
    run_id = scope.name if scope.kind == "run" else ""
    return DecisionRecord(KNOBS, f"{scope}: {words or 'nothing changed'}", 0.0, details, now, run_id)


def step_ended(end: StepEnd, now: float) -> DecisionRecord:
    """Explain the speculation of a step. The gain is the mean predicted gain over plain decoding."""
    totals = end.totals
    steps, acceptance = totals.engine_steps, totals.acceptance
    drafted, others = 0, list[str]()
    for name, count in totals.reasons.most_common():
        reason = PlanReason.known(name)
        if reason is not None and reason.drafted:
            drafted += count
        else:
            others.append(f"{name if reason is None else reason.words} in {count}")
    words = f"step {end.step}: {drafted} of {steps} engine steps verified drafts"
    if acceptance.verifications:
        words += f", {acceptance.block_efficiency:.2f} tokens a verification"
    if totals.lacking_steps:
        others.append(f"the suffix index had no room for some samples in {totals.lacking_steps}")
    details = {
        "step": end.step,
        "mode": totals.mode,
        "instances": end.instances,
        "engine_steps": steps,
        "reasons": dict(totals.reasons),
        "planned_tokens": totals.planned_tokens,
        "expected_tokens": round(totals.expected_tokens, 1),
        "predicted_seconds": round(totals.predicted_seconds, 4),
        "measured_seconds": round(totals.measured_seconds, 4),
        "lacking_steps": totals.lacking_steps,
        "block_efficiency": round(acceptance.block_efficiency, 3),
        "drafts": {
            name: [each.verifications, each.drafted, each.accepted] for name, each in totals.drafts.items()
        },
        "lengths": {
            name: [each.drafted_lengths, each.accepted_lengths] for name, each in totals.drafts.items()
        },
    }
    gain = totals.predicted_gain / steps if steps else 0.0
    return DecisionRecord(SPECULATION, "; ".join([words, *others]), gain, details, now, end.run_id)


def cap_moved(end: StepEnd, before: Rung, move: LadderMove, now: float) -> DecisionRecord:
    """Explain a move on a ladder. The gain is in tokens per verification, if acceptance stays the same."""
    cap, acceptance = move.rung.cap, end.totals.acceptance
    words = f"step {end.step}: cap {before.cap} -> {cap} tokens: {move.reason}"
    details = {"step": end.step, "from": before.cap, "to": cap, "fullness": round(acceptance.fullness, 4)}
    per_token = acceptance.accepted / acceptance.drafted if acceptance.drafted else 0.0
    gain = (cap - before.cap) * per_token / acceptance.block_efficiency if cap > before.cap else 0.0
    return DecisionRecord(DRAFT_CAP, words, gain, details, now, end.run_id)


def switched(switch: pb.Switch, instance_id: str) -> DecisionRecord:
    """Explain that speculation was switched on or off on an instance."""
    words = (
        f"step {switch.step}: {'on' if switch.on else 'off'} at {switch.requests} samples: "
        f"predicted {switch.predicted_speedup:.2f} of plain decoding"
    )
    details = {"step": switch.step, "on": switch.on, "requests": switch.requests, "instance": instance_id}
    at = switch.time.ToNanoseconds() / 1e9
    return DecisionRecord(TOGGLE, words, switch.predicted_speedup - 1.0, details, at, switch.run_id)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
