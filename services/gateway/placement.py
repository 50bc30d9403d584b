"""Which waiting samples go to which instance now.

Pure: no clock, no I/O. Binding is late: what fits on no instance waits here, so that a sample goes to
whichever instance is free when its turn comes. The longest predicted sample goes first, to the instance
with the fewest predicted tokens left (longest-processing-time-first scheduling). Where the difference
in load is no more than the sample itself, the instance that already has samples of the same prompt wins,
because they share a prefix cache and drafts.
"""

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Ref = TypeVar("Ref", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Ref]):
    """A sample without an instance. `predicted` is in tokens still to come; `order` breaks ties."""

    ref: Ref
    prompt: Hashable
    policy_version: int
    predicted: float
    order: int


@dataclass(slots=True, eq=False)
class Slots:
    """What an instance can take: `room` more samples; `load` predicted tokens are still to come on it;
    `prompts` counts its samples by prompt."""

    instance_id: str
    policy_version: int
    room: int
    load: float
    prompts: dict[Hashable, int] = field(default_factory=dict)

    def take(self, prompt: Hashable, predicted: float) -> None:
        """Counts one more sample."""
        self.room -= 1
        self.load += predicted
        self.prompts[prompt] = self.prompts.get(prompt, 0) + 1

    def give_back(self, prompt: Hashable, predicted: float) -> None:
        """Undoes `take`."""
        self.room += 1
        self.load -= predicted
        left = self.prompts.get(prompt, 0) - 1
        if left > 0:
            self.prompts[prompt] = left
        else:
            self.prompts.pop(prompt, None)


@dataclass(frozen=True, slots=True)
class Assignment(Generic[Ref]):
    """A waiting sample and the instance that it goes to."""

    waiting: Waiting[Ref]
    instance_id: str


class WaitingQueue(Generic[Ref]):
    """Waiting samples, longest predicted first. All operations are O(log n) per sample concerned."""

    def __init__(self) -> None:
        self._entries: dict[Ref, tuple[int, Waiting[Ref]]] = {}
        # One heap per policy version, so that samples no instance may run cost nothing to skip.
        self._heaps: dict[int, list[tuple[float, int, int, Ref]]] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._entries

    def push(self, waiting: Waiting[Ref]) -> None:
        """Adds a sample, or moves it to the place of its new prediction."""
        self._stamp += 1
        self._entries[waiting.ref] = (self._stamp, waiting)
        heap = self._heaps.setdefault(waiting.policy_version, [])
        heapq.heappush(heap, (-waiting.predicted, waiting.order, self._stamp, waiting.ref))

    def discard(self, ref: Ref) -> bool:
        """Removes a sample; False when it was not waiting. Its heap entry is dropped when it surfaces."""
        return self._entries.pop(ref, None) is not None

    def take(self, ref: Ref) -> Waiting[Ref] | None:
        """Takes one sample from the queue, whatever waits before it; None when it was not waiting."""
        entry = self._entries.pop(ref, None)
        return None if entry is None else entry[1]

    def place(self, instances: Iterable[Slots], slack: float = 1.0) -> list[Assignment[Ref]]:
        """Takes from the queue all that fits, and says where to. Updates the `instances` given."""
        by_version: dict[int, list[Slots]] = {}
        for slots in instances:
            if slots.room > 0:
                by_version.setdefault(slots.policy_version, []).append(slots)
        return [
            assignment
            for version, free in by_version.items()
            for assignment in self._place_version(version, free, slack)
        ]

    def _place_version(self, version: int, free: list[Slots], slack: float) -> list[Assignment[Ref]]:
        placed = []
        while free and (waiting := self._pop(version)) is not None:
            chosen = choose(waiting, free, slack)
            chosen.take(waiting.prompt, waiting.predicted)
            placed.append(Assignment(waiting, chosen.instance_id))
            if chosen.room == 0:
                free.remove(chosen)
        return placed

    def _pop(self, version: int) -> Waiting[Ref] | None:
        heap = self._heaps.get(version, [])
        while heap:
            _, _, stamp, ref = heapq.heappop(heap)
            entry = self._entries.get(ref)
            if entry is not None and entry[0] == stamp:
                del self._entries[ref]
                return entry[1]
        self._heaps.pop(version, None)
        return None


def choose(waiting: Waiting[Ref], free: list[Slots], slack: float) -> Slots:
    """The instance for one sample: among those within `slack` times the sample's own length of the least
    load, the one with most samples of its prompt; then the least loaded; then the first by name."""
    bound = min(slots.load for slots in free) + slack * waiting.predicted
    near = (slots for slots in free if slots.load <= bound)
    return min(near, key=lambda s: (-s.prompts.get(waiting.prompt, 0), s.load, s.instance_id))
