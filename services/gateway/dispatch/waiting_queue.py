"""Order of the samples that wait for an instance.

Pure: no clock, no I/O. Binding is late: samples that fit on no instance wait here, so that each goes to whichever
instance is free when its turn comes. Higher priorities go first. The runs of one priority share by weight, in
predicted tokens (start-time fair queuing: Goyal, Vin and Cheng, 1997): the next sample is of the run that has
had least for its weight, and a run gains nothing by having waited for nothing. Of one run the longest predicted
sample goes first (longest-processing-time-first scheduling), after those that an instance has the KV of: what is
begun is ended before more is begun, and before that KV is gone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.gateway.dispatch.placement import InstancePool

Ref = TypeVar("Ref", bound=Hashable)


@dataclass(frozen=True, slots=True)
class WaitingSample(Generic[Ref]):
    """Sample without an instance. `predicted` is in tokens still to come; `order` breaks ties.

    `weight` is that of its run, which holds for all samples of the run in its priority. The instance `home`, if
    any, has the KV of its `context`, in tokens.
    """

    ref: Ref
    prompt: Hashable
    policy_version: int
    predicted: float
    order: int
    run: str = ""
    priority: int = 0
    weight: int = 1
    home: str = ""
    context: int = 0


@dataclass(frozen=True, slots=True)
class Placement(Generic[Ref]):
    """Waiting sample, and the instance that it goes to."""

    waiting: WaitingSample[Ref]
    instance_id: str


@dataclass(slots=True, eq=False)
class _Share(Generic[Ref]):
    """Waiting samples of one run, and the virtual time up to which it has had its share."""

    weight: int = 1
    had: float = 0.0
    # Samples that wait; the heap has void entries, too.
    waiting: int = 0
    in_turn: bool = False
    # (predicted tokens, negative; order; stamp; sample)
    heap: list[tuple[float, int, int, Ref]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Level(Generic[Ref]):
    """Runs of one priority. `clock` is the virtual time of the run that was served last."""

    clock: float = 0.0
    shares: dict[str, _Share[Ref]] = field(default_factory=dict)
    # (virtual time, run) of the runs with samples
    turns: list[tuple[float, str]] = field(default_factory=list)


class WaitingQueue(Generic[Ref]):
    """Queue of waiting samples. All operations are O(log n) per sample concerned."""

    def __init__(self) -> None:
        self._entries: dict[Ref, tuple[int, WaitingSample[Ref], _Share[Ref]]] = {}
        # By policy version, so that samples no instance may run cost nothing to skip; then by priority.
        self._levels: dict[int, dict[int, _Level[Ref]]] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._entries

    def push(self, waiting: WaitingSample[Ref]) -> None:
        """Add a sample, or move it to the place of its new prediction."""
        self.take(waiting.ref)
        levels = self._levels.setdefault(waiting.policy_version, {})
        level = levels.setdefault(waiting.priority, _Level())
        share = level.shares.setdefault(waiting.run, _Share())
        share.weight = waiting.weight
        if not share.in_turn:
            share.in_turn, share.had = True, max(share.had, level.clock)
            heapq.heappush(level.turns, (share.had, waiting.run))
        self._stamp += 1
        share.waiting += 1
        self._entries[waiting.ref] = (self._stamp, waiting, share)
        rank = -math.inf if waiting.home else -waiting.predicted
        heapq.heappush(share.heap, (rank, waiting.order, self._stamp, waiting.ref))
        if len(share.heap) > 4 * share.waiting + 64:
            share.heap = [each for each in share.heap if self._is_valid(each)]
            heapq.heapify(share.heap)

    def discard(self, ref: Ref) -> bool:
        """Remove a sample; return False if it was not waiting. Its heap entry is dropped when it surfaces."""
        return self.take(ref) is not None

    def take(self, ref: Ref) -> WaitingSample[Ref] | None:
        """Take one sample out of the queue, whatever waits before it; None if it was not waiting."""
        entry = self._entries.pop(ref, None)
        if entry is None:
            return None
        _, waiting, share = entry
        share.waiting -= 1
        return waiting

    def place_next(self, pool: InstancePool, slack: float = 1.0) -> Placement[Ref] | None:
        """Take the next sample that fits out of the queue and give it a slot of its instance; None if none fits."""
        for version in list(self._levels):
            if pool.least(version) is None:
                continue
            waiting = self._pop(version)
            if waiting is None:
                continue
            spared = slack * waiting.predicted + waiting.context
            chosen = pool.at_home(version, waiting.home, spared) if waiting.home else None
            chosen = chosen or pool.choose(version, waiting.prompt, waiting.predicted, slack)
            assert chosen is not None, "the least loaded instance has room"
            chosen.take(waiting.prompt, waiting.predicted)
            return Placement(waiting, chosen.instance_id)
        return None

    def _pop(self, version: int) -> WaitingSample[Ref] | None:
        levels = self._levels[version]
        while levels:
            priority = max(levels)
            waiting = self._pop_fairly(levels[priority])
            if waiting is not None:
                return waiting
            del levels[priority]
        del self._levels[version]
        return None

    def _pop_fairly(self, level: _Level[Ref]) -> WaitingSample[Ref] | None:
        while level.turns:
            had, run = level.turns[0]
            share = level.shares[run]
            waiting = self._pop_longest(share)
            if waiting is not None:
                level.clock = had
                # All that a sample needs is counted when it begins.
                share.had = had + (0.0 if waiting.home else waiting.predicted / share.weight)
                heapq.heapreplace(level.turns, (share.had, run))
                return waiting
            heapq.heappop(level.turns)
            share.in_turn = False
        return None

    def _pop_longest(self, share: _Share[Ref]) -> WaitingSample[Ref] | None:
        while share.heap:
            entry = heapq.heappop(share.heap)
            if self._is_valid(entry):
                return self.take(entry[3])
        return None

    def _is_valid(self, entry: tuple[float, int, int, Ref]) -> bool:
        known = self._entries.get(entry[3])
        return known is not None and known[0] == entry[2]
