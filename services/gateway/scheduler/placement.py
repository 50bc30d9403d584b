"""Order the waiting samples, and choose the instance for each. Pure: no clock, no I/O.

Binding is late: samples wait until an instance has room, so that each goes to the instance that is free at its
turn. Higher priorities come first. The runs of one priority share by weight, in predicted tokens (start-time fair
queuing: Goyal, Vin and Cheng, 1997): the next sample is of the run that has had least for its weight, and a run
gains nothing by a time without samples. Within a run, samples whose KV an instance holds come first: begun work
ends before new work begins, and before that KV is evicted. Then comes the longest predicted sample
(longest-processing-time-first scheduling).

A sample is placed on the instance with the fewest predicted tokens left. If the difference in load is at most the
sample itself, an instance that already has samples of the same prompt is preferred, because they share a prefix
cache and drafts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Generic, TypeVar

# Most instances with samples of a prompt that are compared: those that got one last.
MOST_COMPARED = 64


class InstanceSlots:
    """Room of an instance for samples.

    It has room for `room` more samples, has `load` predicted tokens still to generate, and counts its samples by
    prompt in `prompts`. Its pool is notified of every change.
    """

    __slots__ = ("instance_id", "load", "policy_version", "pool", "prompts", "room", "stamp")

    def __init__(
        self,
        instance_id: str,
        policy_version: int,
        room: int,
        load: float = 0.0,
        prompts: dict[Hashable, int] | None = None,
    ) -> None:
        self.instance_id = instance_id
        # Version of the samples that the instance takes.
        self.policy_version = policy_version
        self.room = room
        self.load = load
        self.prompts: dict[Hashable, int] = {} if prompts is None else prompts
        self.pool: InstancePool | None = None
        # Number of the last change; entries of earlier changes in the pool's heaps are void.
        self.stamp = 0

    def serve(self, version: int) -> None:
        """Take samples of this policy version from now on."""
        self.policy_version = version
        if self.pool is not None:
            self.pool.changed(self)

    def take(self, prompt: Hashable, predicted: float) -> None:
        """Count one more sample."""
        self.room -= 1
        self.load += predicted
        count = self.prompts.get(prompt, 0) + 1
        self.prompts[prompt] = count
        if self.pool is not None:
            self.pool.moved_in(self, prompt)

    def give_back(self, prompt: Hashable, predicted: float) -> None:
        """Undo `take`."""
        self.room += 1
        left = self.prompts.get(prompt, 0) - 1
        if left > 0:
            self.prompts[prompt] = left
        else:
            self.prompts.pop(prompt, None)
        # Without samples exactly 0: rounding errors must not add up.
        self.load = self.load - predicted if self.prompts else 0.0
        if self.pool is not None:
            self.pool.moved_out(self, prompt)


class InstancePool:
    """Instances by load. Choosing one and changing one are O(log n).

    `is_open` returns True if an instance takes samples at present. An instance that did not is checked again only
    when it changes, or after `look_again`.
    """

    def __init__(self, is_open: Callable[[InstanceSlots], bool] = lambda _: True) -> None:
        self._is_open = is_open
        self._instances: dict[str, InstanceSlots] = {}
        # Policy version -> heap of (load, instance id, stamp) of instances with room.
        self._heaps: dict[int, list[tuple[float, str, int]]] = {}
        # Prompt -> the instances that have samples of it, in the order in which they last got one.
        self._homes: dict[Hashable, dict[InstanceSlots, None]] = {}
        self._closed: set[InstanceSlots] = set()
        self._stamps = count(1)

    def add(self, slots: InstanceSlots) -> None:
        """Add an instance, and replace an earlier one of its name."""
        old = self._instances.get(slots.instance_id)
        if old is not None:
            self.remove(old)
        self._instances[slots.instance_id], slots.pool = slots, self
        for prompt in slots.prompts:
            self._homes.setdefault(prompt, {})[slots] = None
        self.changed(slots)

    def remove(self, slots: InstanceSlots) -> None:
        """Remove an instance."""
        if slots.pool is not self:
            return
        del self._instances[slots.instance_id]
        slots.pool = None
        self._closed.discard(slots)
        for prompt in slots.prompts:
            self._leave_home(slots, prompt)

    def choose(self, version: int, prompt: Hashable, predicted: float, slack: float) -> InstanceSlots | None:
        """Return the instance for one sample of this version; None if there is no room.

        Candidates have at most the least load plus `slack` times the sample's own length. Among them the one with
        most samples of its prompt is chosen; then the least loaded; then the first by name. Of the instances with
        samples of the prompt, only the latest MOST_COMPARED are compared.
        """
        least = self.least(version)
        if least is None:
            return None
        bound = least.load + slack * predicted
        best, rank = least, _rank(least, prompt)
        for slots in islice(reversed(self._homes.get(prompt, {})), MOST_COMPARED):
            if slots.room < 1 or slots.load > bound or slots.policy_version != version:
                continue
            if _rank(slots, prompt) < rank and self._is_open(slots):
                best, rank = slots, _rank(slots, prompt)
        return best

    def at_home(self, version: int, home: str, spared: float) -> InstanceSlots | None:
        """Return the instance `home`, which has the KV of a sample; None if another is better or it has no room.

        It may have up to `spared` more tokens to generate than the least loaded one.
        """
        least, slots = self.least(version), self._instances.get(home)
        if least is None or slots is None or slots.room < 1 or slots.policy_version != version:
            return None
        near = slots.load <= least.load + spared
        return slots if near and self._is_open(slots) else None

    def least(self, version: int) -> InstanceSlots | None:
        """Return the least loaded instance with room, the first by name if there are several."""
        heap = self._heaps.get(version, [])
        while heap:
            _, instance_id, stamp = heap[0]
            slots = self._instances.get(instance_id)
            if slots is not None and slots.stamp == stamp:
                if self._is_open(slots):
                    return slots
                self._closed.add(slots)
            heapq.heappop(heap)
        return None

    def look_again(self) -> None:
        """Check again whether closed instances are open."""
        closed, self._closed = self._closed, set()
        for slots in closed:
            self.changed(slots)

    def changed(self, slots: InstanceSlots) -> None:
        """Update the position of an instance."""
        slots.stamp = next(self._stamps)
        if slots.room < 1:
            return
        heap = self._heaps.get(slots.policy_version)
        if heap is None:
            # No instance may be left with a former version.
            self._heaps = {version: kept for version in self._heaps if (kept := self._compact(version))}
            heap = self._heaps[slots.policy_version] = []
        heapq.heappush(heap, (slots.load, slots.instance_id, slots.stamp))
        if len(heap) > 4 * len(self._instances) + 64:
            self._heaps[slots.policy_version] = self._compact(slots.policy_version)

    def moved_in(self, slots: InstanceSlots, prompt: Hashable) -> None:
        """Record that an instance got a sample of this prompt."""
        homes = self._homes.setdefault(prompt, {})
        homes.pop(slots, None)
        homes[slots] = None
        self.changed(slots)

    def moved_out(self, slots: InstanceSlots, prompt: Hashable) -> None:
        """Record that a sample of this prompt has left an instance."""
        if prompt not in slots.prompts:
            self._leave_home(slots, prompt)
        self.changed(slots)

    def _leave_home(self, slots: InstanceSlots, prompt: Hashable) -> None:
        homes = self._homes.get(prompt, {})
        homes.pop(slots, None)
        if not homes:
            self._homes.pop(prompt, None)

    def _compact(self, version: int) -> list[tuple[float, str, int]]:
        """Return the heap of a version without void entries."""
        stamps = {each.instance_id: each.stamp for each in self._instances.values()}
        kept = [entry for entry in self._heaps[version] if stamps.get(entry[1]) == entry[2]]
        heapq.heapify(kept)
        return kept


def _rank(slots: InstanceSlots, prompt: Hashable) -> tuple[int, float, str]:
    return -slots.prompts.get(prompt, 0), slots.load, slots.instance_id


Ref = TypeVar("Ref", bound=Hashable)


@dataclass(frozen=True, slots=True)
class WaitingSample(Generic[Ref]):
    """Sample without an instance. `predicted` is the number of tokens still to come; `order` breaks ties.

    `weight` is the weight of its run, which applies to all samples of the run in its priority. The instance `home`,
    if any, has the KV of its `context`, in tokens.
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
    """Waiting sample, and the instance on which it is placed."""

    waiting: WaitingSample[Ref]
    instance_id: str


@dataclass(slots=True, eq=False)
class _Share:
    """Waiting samples of one run, and the virtual time up to which it has had its share."""

    weight: int = 1
    had: float = 0.0
    # Samples that wait; the heap also has void entries.
    waiting: int = 0
    in_turn: bool = False
    # (predicted tokens, negative; order; stamp). Without the sample, so that no void entry keeps a batch in memory.
    heap: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Level:
    """Runs of one priority. `clock` is the virtual time of the run that was served last."""

    clock: float = 0.0
    shares: dict[str, _Share] = field(default_factory=dict)
    # (virtual time, run) of the runs with samples
    turns: list[tuple[float, str]] = field(default_factory=list)


def _has_samples(levels: Mapping[int, _Level]) -> bool:
    return any(share.waiting for level in levels.values() for share in level.shares.values())


class WaitingQueue(Generic[Ref]):
    """Queue of waiting samples. All operations are O(log n) per sample concerned."""

    def __init__(self) -> None:
        self._entries: dict[Ref, tuple[int, WaitingSample[Ref], _Share]] = {}
        # By stamp; void entries are not in it.
        self._refs: dict[int, Ref] = {}
        # By policy version, so that versions that no instance has are skipped at no cost; then by priority.
        self._levels: dict[int, dict[int, _Level]] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._entries

    def push(self, waiting: WaitingSample[Ref]) -> None:
        """Add a sample, or move it to its new position."""
        self.take(waiting.ref)
        levels = self._levels.get(waiting.policy_version)
        if levels is None:
            # No sample may be left with a former version.
            self._levels = {version: kept for version, kept in self._levels.items() if _has_samples(kept)}
            levels = self._levels[waiting.policy_version] = {}
        level = levels.setdefault(waiting.priority, _Level())
        share = level.shares.setdefault(waiting.run, _Share())
        share.weight = waiting.weight
        if not share.in_turn:
            share.in_turn, share.had = True, max(share.had, level.clock)
            heapq.heappush(level.turns, (share.had, waiting.run))
        self._stamp += 1
        share.waiting += 1
        self._entries[waiting.ref], self._refs[self._stamp] = (self._stamp, waiting, share), waiting.ref
        rank = -math.inf if waiting.home else -waiting.predicted
        heapq.heappush(share.heap, (rank, waiting.order, self._stamp))

    def discard(self, ref: Ref) -> bool:
        """Remove a sample; return False if it was not waiting."""
        return self.take(ref) is not None

    def take(self, ref: Ref) -> WaitingSample[Ref] | None:
        """Remove one sample from any position and return it; None if it was not waiting."""
        entry = self._entries.pop(ref, None)
        if entry is None:
            return None
        stamp, waiting, share = entry
        share.waiting -= 1
        del self._refs[stamp]
        if len(share.heap) > 4 * share.waiting + 64:
            share.heap = [each for each in share.heap if each[2] in self._refs]
            heapq.heapify(share.heap)
        return waiting

    def place_next(self, pool: InstancePool, slack: float = 1.0) -> Placement[Ref] | None:
        """Remove the next sample that fits and give it a slot of its instance; return None if none fits."""
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

    def _pop_fairly(self, level: _Level) -> WaitingSample[Ref] | None:
        while level.turns:
            had, run = level.turns[0]
            share = level.shares[run]
            waiting = self._pop_longest(share)
            if waiting is not None:
                level.clock = had
                # The whole work of a sample is charged when it begins.
                share.had = had + (0.0 if waiting.home else waiting.predicted / share.weight)
                heapq.heapreplace(level.turns, (share.had, run))
                return waiting
            heapq.heappop(level.turns)
            share.in_turn = False
        return None

    def _pop_longest(self, share: _Share) -> WaitingSample[Ref] | None:
        while share.heap:
            _, _, stamp = heapq.heappop(share.heap)
            if stamp in self._refs:
                return self.take(self._refs[stamp])
        return None
