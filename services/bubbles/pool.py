"""Pool of the tasks of one hinted step: free, leased and finished ones. Pure.

Tasks are given out in waves, likely stragglers first. A group has one expected length; groups of similar length
form a band, and a wave is one slot of all groups of a band: band after band, slot after slot. So every prompt of a
band has a draft before any has two (a short bubble covers all stragglers evenly), and an instance that takes
several waves takes prompts that it already has, whose samples share their prefix.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from paceline.internal.v1 import bubble_pb2 as pb

SIMILAR = 0.8
"""Groups are in one band while their expected length is at least this share of the band's longest."""

_PERSON = b"paceline-bubble"
# Prompt id and slot.
Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class PooledTask:
    """One sample to pre-generate.

    `tokens` were kept by an instance and can be fetched; `running` tokens belong to the current lease and are lost
    with its instance.
    """

    group: pb.HintedGroup
    slot: int
    seed: int
    wave: int
    tokens: int = 0
    finished: bool = False
    # Number of the valid lease; 0 for none.
    lease: int = 0
    running: int = 0
    # Instance of the last lease.
    last: str = ""

    @property
    def key(self) -> Key:
        return self.group.prompt_id, self.slot

    @property
    def covered(self) -> int:
        """Number of tokens generated so far."""
        return max(self.tokens, self.running)


class FreeTasks:
    """Free tasks of one wave, in the order in which they became free.

    `take` is linear in the number of taken tasks and of preferred prompts.
    """

    def __init__(self) -> None:
        self._tasks: dict[Key, tuple[int, PooledTask]] = {}
        self._of_instance: dict[str, dict[Key, None]] = {}
        self._next = 0
        # All tasks of a wave have the same slot.
        self._slot = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: PooledTask) -> None:
        """Add a task as the last one."""
        self._tasks[task.key] = (self._next, task)
        self._next += 1
        self._slot = task.slot
        self._index(task)

    def remove(self, task: PooledTask) -> bool:
        """Remove a task; return False if it is not there."""
        if self._tasks.pop(task.key, None) is None:
            return False
        self._unindex(task)
        return True

    def keep(self, task: PooledTask, instance_id: str) -> None:
        """Record the last instance of a task, free or not; its place in the order stays the same."""
        self._unindex(task)
        task.last = instance_id
        if task.key in self._tasks:
            self._index(task)

    def take(self, most: int, instance_id: str, prompts: Collection[str]) -> list[PooledTask]:
        """Take at most `most` tasks: first the instance's earlier ones, then tasks of `prompts`, then others."""
        if most >= len(self._tasks):
            taken = [task for _, task in self._tasks.values()]
        else:
            own = self._of_instance.get(instance_id, {}).keys()
            keys = ((prompt, self._slot) for prompt in prompts)
            siblings = {key for key in keys if key in self._tasks and key not in own}
            first = [*self._in_order(own), *self._in_order(siblings)][:most]
            others = (
                task for key, (_, task) in self._tasks.items() if key not in own and key not in siblings
            )
            taken = [*first, *islice(others, most - len(first))]
        for task in taken:
            self.remove(task)
        return taken

    def _index(self, task: PooledTask) -> None:
        if task.last:
            self._of_instance.setdefault(task.last, {})[task.key] = None

    def _unindex(self, task: PooledTask) -> None:
        own = self._of_instance.get(task.last)
        if own is not None:
            own.pop(task.key, None)
            if not own:
                del self._of_instance[task.last]

    def _in_order(self, keys: Collection[Key]) -> list[PooledTask]:
        return [task for _, task in sorted((self._tasks[key] for key in keys), key=itemgetter(0))]


class StepPool:
    """Tasks of one hint.

    `open` tasks are not finished; tasks that are neither finished nor leased are `free`. A pool whose step has
    begun is no longer `wanted`: it only remembers the progress of its tasks.
    """

    def __init__(
        self, hint: pb.PutHintRequest, *, coupled: bool = True, per_prompt: int | None = None
    ) -> None:
        """Make the tasks of a hint.

        `coupled`: with the seeds of the step. `per_prompt`: samples for each prompt, by default as many as the
        group has; further ones get separate seeds.
        """
        self.hint = hint
        self.wanted = True
        self.tasks = {task.key: task for task in _tasks(hint, coupled, per_prompt)}
        self.open = len(self.tasks)
        self._free = [FreeTasks() for _ in range(_waves(self.tasks.values()))]
        for task in self.tasks.values():
            self._free[task.wave].add(task)
        self.free = len(self.tasks)

    @property
    def leased(self) -> int:
        """Number of tasks that instances have."""
        return self.open - self.free

    def adopt(self, old: StepPool) -> None:
        """Copy the progress of tasks that an earlier hint for the step named as well."""
        if old.hint.exactness != self.hint.exactness:
            return
        for key, task in list(self.tasks.items()):
            known = old.tasks.get(key)
            if known is None or not _same(known, task):
                continue
            self._free[task.wave].remove(task)
            self.free -= 1
            known.group, known.wave = task.group, task.wave
            self.tasks[key] = known
            if known.finished:
                self.open -= 1
            elif not known.lease:
                self._add_free(known)

    def take(self, count: int, instance_id: str, prompts: Collection[str]) -> list[PooledTask]:
        """Take at most `count` free tasks, wave by wave.

        Within a wave the instance's earlier tasks come first, then tasks of `prompts`, which it already has.
        """
        taken: list[PooledTask] = []
        for wave in self._free:
            if len(taken) >= count:
                break
            if wave:
                taken += wave.take(count - len(taken), instance_id, prompts)
        self.free -= len(taken)
        return taken

    def keep(self, task: PooledTask, instance_id: str) -> None:
        """Record that an instance had a task and kept its tokens."""
        self._free[task.wave].keep(task, instance_id)

    def put_back(self, task: PooledTask) -> None:
        """Make a leased task free again."""
        if not task.finished:
            self._add_free(task)

    def finish(self, task: PooledTask) -> None:
        """Record that a task, leased or free, is fully generated."""
        if task.finished:
            return
        task.finished = True
        self.open -= 1
        if self._free[task.wave].remove(task):
            self.free -= 1

    def _add_free(self, task: PooledTask) -> None:
        self._free[task.wave].add(task)
        self.free += 1


def _tasks(hint: pb.PutHintRequest, coupled: bool, per_prompt: int | None) -> Iterator[PooledTask]:
    wave = 0
    for band in _bands(hint.groups):
        counts = [per_prompt or len(group.seeds) for group in band]
        for slot in range(max(counts)):
            for group, count in zip(band, counts, strict=True):
                if slot < count:
                    yield PooledTask(group, slot, _seed(group, slot, coupled), wave)
            wave += 1


def _bands(groups: Collection[pb.HintedGroup]) -> Iterator[list[pb.HintedGroup]]:
    """Yield groups of similar expected length together, the longest first; ties in the hint's order."""
    band: list[pb.HintedGroup] = []
    for group in sorted(groups, key=lambda each: -each.expected_tokens):
        if band and group.expected_tokens < SIMILAR * band[0].expected_tokens:
            yield band
            band = []
        band.append(group)
    if band:
        yield band


def _waves(tasks: Collection[PooledTask]) -> int:
    return 1 + max((task.wave for task in tasks), default=-1)


def _seed(group: pb.HintedGroup, slot: int, coupled: bool) -> int:
    seed = int(group.seeds[slot % len(group.seeds)])
    return seed if coupled and slot < len(group.seeds) else uncoupled_seed(seed, slot)


def _same(known: PooledTask, task: PooledTask) -> bool:
    return (
        known.seed == task.seed
        and known.group.prompt_token_ids == task.group.prompt_token_ids
        and known.group.sampling == task.group.sampling
    )


def uncoupled_seed(seed: int, slot: int) -> int:
    """Return a separate seed for `slot`, whose noise no sample of the step has.

    It is BLAKE2b with an 8-byte digest, read as a little-endian integer, over

        seed of one of the step's samples (8 bytes) | slot (8 bytes)

    both little-endian, personalised with "paceline-bubble" so that it differs from every seed of
    `services.contracts.seeds`.
    """
    packed = struct.pack("<QQ", seed, slot)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=_PERSON).digest(), "little")
