"""Placement rules: the instance for each waiting sample.

Pure: no clock, no I/O. The sample goes to the instance with the fewest predicted tokens left. Where the difference
in load is no more than the sample itself, the instance that already has samples of the same prompt wins,
because they share a prefix cache and drafts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from itertools import count, islice

# Instances with samples of a prompt that are compared; of more, those that got one last.
MOST_COMPARED = 64


class InstanceSlots:
    """Room of an instance for samples.

    It takes `room` more samples, has `load` predicted tokens still to generate, and counts its samples by
    prompt in `prompts`. The pool that it is in learns of every change.
    """

    __slots__ = ("_version", "instance_id", "load", "pool", "prompts", "room", "stamp")

    def __init__(
        self,
        instance_id: str,
        policy_version: int,
        room: int,
        load: float = 0.0,
        prompts: dict[Hashable, int] | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.room = room
        self.load = load
        self.prompts: dict[Hashable, int] = {} if prompts is None else prompts
        self.pool: InstancePool | None = None
        # Number of the last change: entries of earlier ones in the pool's heaps are void.
        self.stamp = 0
        self._version = policy_version

    @property
    def policy_version(self) -> int:
        """The policy version whose samples the instance takes."""
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._version = version
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

    `is_open` tells whether an instance takes samples at all just now. One that did not is looked at again only
    when it changes, or after `look_again`.
    """

    def __init__(self, is_open: Callable[[InstanceSlots], bool] = lambda _: True) -> None:
        self._is_open = is_open
        self._instances: dict[str, InstanceSlots] = {}
        # Policy version -> heap of (load, instance id, stamp) of instances with room.
        self._heaps: dict[int, list[tuple[float, str, int]]] = {}
        # Prompt -> the instances that have samples of it, in the order in which they got the last one.
        self._homes: dict[Hashable, dict[InstanceSlots, None]] = {}
        self._closed: set[InstanceSlots] = set()
        self._stamps = count(1)

    def add(self, slots: InstanceSlots) -> None:
        """Add an instance, in place of an earlier one of its name."""
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

        Among those within `slack` times the sample's own length of the least load: the one with most samples
        of its prompt; then the least loaded; then the first by name. Of instances with samples of the prompt
        only the latest MOST_COMPARED are compared.
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
        """Return the instance that has the KV of a sample; None if another is better or it has no room.

        It may have `spared` more tokens to generate than the least loaded one.
        """
        least, slots = self.least(version), self._instances.get(home)
        if least is None or slots is None or slots.room < 1 or slots.policy_version != version:
            return None
        near = slots.load <= least.load + spared
        return slots if near and self._is_open(slots) else None

    def least(self, version: int) -> InstanceSlots | None:
        """Return the least loaded instance with room, by name if there are several."""
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
        """Ask again whether the instances that were closed are open."""
        closed, self._closed = self._closed, set()
        for slots in closed:
            self.changed(slots)

    def changed(self, slots: InstanceSlots) -> None:
        """Bring an instance to the place of its load."""
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
