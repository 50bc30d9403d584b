"""Rollouts of one replica of the store, within a budget of bytes. Pure: no clock, no I/O.

Time is logical: the order of puts and fetches. When the budget is exceeded, rollouts are evicted in this order:

1. pre-generated ones whose step has passed: their run has history of a later step (longest known first);
2. history that is not the newest of its slot (first superseded first);
3. whole prompts, the one least recently put or fetched first.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from services.contracts.rollout import RolloutKind, StoredRollout

ROLLOUT_OVERHEAD = 768
"""Bytes charged for a rollout in addition to its arrays and names: objects and entries of the store's tables."""
PROMPT_OVERHEAD = 384
"""Bytes charged for a prompt that has rollouts."""

PromptKey = tuple[str, str]
"""(run_id, prompt_id)"""
SlotKey = tuple[str, str, int]
"""(run_id, prompt_id, slot)"""


class Cause(enum.StrEnum):
    """Cause of a rollout's removal."""

    PASSED = "passed"
    """Over budget: pre-generated for a step that has passed."""
    SUPERSEDED = "superseded"
    """Over budget: history of which there is a newer version."""
    COLD = "cold"
    """Over budget: its prompt was used least recently."""
    SERVED = "served"
    """Pre-generated for a sample that has ended since."""
    SURPLUS = "surplus"
    """More versions of a slot's history than are kept."""
    REQUESTED = "requested"
    """Removed by EvictRollouts."""


BUDGET_CAUSES = (Cause.PASSED, Cause.SUPERSEDED, Cause.COLD)
"""Causes of evictions by the budget, in their order."""


@dataclass(slots=True)
class _Slot:
    """Rollouts of one sample of a prompt; `history` is ordered by policy version, oldest first."""

    history: list[StoredRollout] = field(default_factory=list)
    ahead: dict[int, StoredRollout] = field(default_factory=dict)
    """Pre-generated rollouts by their fork, all of one step."""

    def rollouts(self) -> Iterator[StoredRollout]:
        yield from self.history
        yield from self.ahead.values()

    def drafts(self) -> Iterator[StoredRollout]:
        """Yield the rollouts to draft from: with a finished pre-generated rollout, history adds nothing."""
        own = self.ahead.get(0)
        return iter(self.ahead.values()) if own is not None and own.finished else self.rollouts()


@dataclass(slots=True)
class _Run:
    """Steps of one run."""

    prompts: int = 0
    latest: int = -1
    """Highest step with history; -1 for none."""
    ahead: dict[int, dict[SlotKey, None]] = field(default_factory=dict)
    """Slots with a pre-generated rollout whose step has not passed, by that step."""


class DraftStore:
    """Rollouts by run, prompt, slot, kind and version."""

    def __init__(self, budget_bytes: int, history_versions: int = 2) -> None:
        """Keep at most `history_versions` versions of a slot's history."""
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.tokens = 0
        self.changes = 0
        """Grows with every rollout that is put in or removed."""
        self.removed: Counter[Cause] = Counter()
        self.rollouts: Counter[RolloutKind] = Counter()
        self._history_versions = history_versions
        self._prompts: OrderedDict[PromptKey, dict[int, _Slot]] = OrderedDict()
        """Least recently used first."""
        self._runs: dict[str, _Run] = {}
        self._passed: dict[SlotKey, None] = {}
        self._superseded: dict[tuple[SlotKey, int], None] = {}

    @property
    def prompts(self) -> int:
        """Prompts that have rollouts."""
        return len(self._prompts)

    @property
    def evicted(self) -> int:
        """Rollouts evicted by the budget since the start."""
        return sum(self.removed[cause] for cause in BUDGET_CAUSES)

    def __iter__(self) -> Iterator[StoredRollout]:
        """Yield all rollouts; putting them into an empty store in this order restores it."""
        for slots in self._prompts.values():
            for slot in slots.values():
                yield from slot.rollouts()

    def put(self, rollout: StoredRollout) -> bool:
        """Store a rollout and evict others if needed; return True if it is kept.

        It is not kept if it is older or shorter than the known one, if its sample has ended, or if there is no
        room.
        """
        if cost(rollout) + PROMPT_OVERHEAD > self.budget_bytes or not self._is_news(rollout):
            return False
        key = (rollout.run_id, rollout.prompt_id)
        if key not in self._prompts:
            self._prompts[key] = {}
            self._runs.setdefault(rollout.run_id, _Run()).prompts += 1
            self.bytes += PROMPT_OVERHEAD
        self._prompts.move_to_end(key)
        slot = self._prompts[key].setdefault(rollout.slot, _Slot())
        if rollout.kind is RolloutKind.HISTORY:
            self._put_history(slot, rollout)
        else:
            self._put_pregenerated(slot, rollout)
        return self._shrink(rollout)

    def fetch(self, run_id: str, prompt_id: str, *, whole: bool = True) -> list[StoredRollout]:
        """Return all rollouts of a prompt by slot; in a slot the history comes first, oldest version first.

        Unless `whole`, slots with a finished pre-generated rollout come without their history.
        """
        slots = self._prompts.get((run_id, prompt_id))
        if slots is None:
            return []
        self._prompts.move_to_end((run_id, prompt_id))
        found = (slots[number] for number in sorted(slots))
        return [rollout for slot in found for rollout in (slot.rollouts() if whole else slot.drafts())]

    def evict(
        self,
        run_id: str | None = None,
        prompt_ids: Collection[str] = (),
        before_version: int | None = None,
        kind: RolloutKind | None = None,
    ) -> int:
        """Remove the rollouts that match all given conditions; return their number."""
        chosen = [
            rollout
            for (run, prompt), slots in self._prompts.items()
            if run_id in (None, run) and (not prompt_ids or prompt in prompt_ids)
            for slot in slots.values()
            for rollout in slot.rollouts()
            if kind in (None, rollout.kind) and (before_version is None or rollout.version < before_version)
        ]
        for rollout in chosen:
            self._remove(rollout, Cause.REQUESTED)
        return len(chosen)

    def _is_news(self, rollout: StoredRollout) -> bool:
        slot = self._prompts.get((rollout.run_id, rollout.prompt_id), {}).get(rollout.slot)
        if slot is None:
            return True
        if rollout.kind is RolloutKind.PREGENERATED:
            served = any(each.step >= rollout.step for each in slot.history)
            passed = any(each.step > rollout.step for each in slot.ahead.values())
            known = slot.ahead.get(rollout.fork)
            return not (served or passed) and (known is None or _better(rollout, known))
        full = len(slot.history) >= self._history_versions
        return not full or rollout.version >= slot.history[0].version

    def _put_pregenerated(self, slot: _Slot, rollout: StoredRollout) -> None:
        for known in [*slot.ahead.values()]:
            if known.step < rollout.step or known.fork == rollout.fork:
                del slot.ahead[known.fork]
                self._forget(known)
        slot.ahead[rollout.fork] = rollout
        self._count(rollout, 1)
        key, run = _slot_key(rollout), self._runs[rollout.run_id]
        if rollout.step < run.latest:
            # The whole slot takes the place of its newest rollout.
            self._passed.pop(key, None)
            self._passed[key] = None
        else:
            run.ahead.setdefault(rollout.step, {})[key] = None

    def _put_history(self, slot: _Slot, rollout: StoredRollout) -> None:
        known = next((each for each in slot.history if each.version == rollout.version), None)
        if known is not None:
            slot.history.remove(known)
            self._forget(known)
        insort(slot.history, rollout, key=lambda each: each.version)
        self._count(rollout, 1)
        for each in [*slot.ahead.values()]:
            if each.step <= rollout.step:
                self._remove(each, Cause.SERVED)
        while len(slot.history) > self._history_versions:
            self._remove(slot.history[0], Cause.SURPLUS)
        for each in slot.history[:-1]:
            self._superseded.setdefault((_slot_key(each), each.version))
        self._advance(self._runs[rollout.run_id], rollout.step)

    def _advance(self, run: _Run, step: int) -> None:
        """Record history of a step: pre-generated rollouts of earlier steps have passed."""
        if step <= run.latest:
            return
        run.latest = step
        for passed in sorted(each for each in run.ahead if each < step):
            self._passed.update(run.ahead.pop(passed))

    def _shrink(self, newest: StoredRollout) -> bool:
        """Evict until the budget holds; return True if `newest`, put last, is still there."""
        kept = True
        while self.bytes > self.budget_bytes:
            victims, cause = self._victims(newest)
            for victim in victims:
                self._remove(victim, cause)
                kept = kept and victim is not newest
        return kept

    def _victims(self, newest: StoredRollout) -> tuple[list[StoredRollout], Cause]:
        """Return the rollouts to evict next, and the cause."""
        if self._passed:
            run_id, prompt_id, number = next(iter(self._passed))
            slot = self._prompts[run_id, prompt_id][number]
            return [*slot.ahead.values()], Cause.PASSED
        if self._superseded:
            (run_id, prompt_id, number), version = next(iter(self._superseded))
            slot = self._prompts[run_id, prompt_id][number]
            return [each for each in slot.history if each.version == version], Cause.SUPERSEDED
        (run_id, prompt_id), slots = next(iter(self._prompts.items()))
        found = [each for slot in slots.values() for each in slot.rollouts()]
        if (run_id, prompt_id) == (newest.run_id, newest.prompt_id):
            # Only the prompt in use remains: it loses its other rollouts one by one.
            found = [each for each in found if each is not newest][:1]
        return found, Cause.COLD

    def _remove(self, rollout: StoredRollout, cause: Cause) -> None:
        """Remove a rollout from its slot, and the slot, the prompt and the run if they are empty then."""
        key = (rollout.run_id, rollout.prompt_id)
        slots = self._prompts[key]
        slot = slots[rollout.slot]
        if rollout.kind is RolloutKind.HISTORY:
            slot.history.remove(rollout)
        else:
            del slot.ahead[rollout.fork]
        self._forget(rollout)
        self.removed[cause] += 1
        if not slot.history and not slot.ahead:
            del slots[rollout.slot]
        if not slots:
            del self._prompts[key]
            self.bytes -= PROMPT_OVERHEAD
            run = self._runs[rollout.run_id]
            run.prompts -= 1
            if not run.prompts:
                del self._runs[rollout.run_id]

    def _forget(self, rollout: StoredRollout) -> None:
        """Remove a rollout from tables and totals."""
        self._count(rollout, -1)
        key = _slot_key(rollout)
        if rollout.kind is RolloutKind.HISTORY:
            self._superseded.pop((key, rollout.version), None)
            return
        if self._prompts[rollout.run_id, rollout.prompt_id][rollout.slot].ahead:
            # Others of the slot are still there.
            return
        self._passed.pop(key, None)
        ahead = self._runs[rollout.run_id].ahead
        if rollout.step in ahead:
            ahead[rollout.step].pop(key, None)
            if not ahead[rollout.step]:
                del ahead[rollout.step]

    def _count(self, rollout: StoredRollout, sign: int) -> None:
        self.bytes += sign * cost(rollout)
        self.tokens += sign * len(rollout.tokens)
        self.rollouts[rollout.kind] += sign
        self.changes += 1


def cost(rollout: StoredRollout) -> int:
    """Return the bytes charged for a rollout."""
    return rollout.nbytes + len(rollout.run_id) + len(rollout.prompt_id) + ROLLOUT_OVERHEAD


def _slot_key(rollout: StoredRollout) -> SlotKey:
    return (rollout.run_id, rollout.prompt_id, rollout.slot)


def _better(new: StoredRollout, old: StoredRollout) -> bool:
    """Return True if a pre-generated rollout replaces another of its slot."""
    if new.step != old.step:
        return new.step > old.step
    same, longer = new.seed == old.seed, len(new.tokens) > len(old.tokens)
    if new.version > old.version:
        return len(new.tokens) >= len(old.tokens) or (same and new.finished)
    if old.finished:
        return False
    return same and (longer or new.finished)
