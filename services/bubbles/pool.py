"""The samples of one hinted step: which are free, which are leased, how far each is. Pure.

They are given out in waves, likely stragglers first. A group shares one expected length, so groups of similar
length form a band, and a wave is one slot of all groups of a band: band after band, slot after slot. So
every prompt of a band has a draft before any has two (a short bubble covers all stragglers evenly), and where
an instance takes several waves it takes prompts that it has already: these share their prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.seeds import uncoupled_seed

SIMILAR = 0.8
"""Groups are in one band while their expected length is at least this share of the band's longest."""

# Prompt id and slot.
Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class Item:
    """One sample to pre-generate. `tokens` were kept by an instance and can be fetched; `running` is how far
    the lease is that it has now, and is lost with its instance."""

    group: pb.HintedGroup
    slot: int
    seed: int
    wave: int
    tokens: int = 0
    finished: bool = False
    # The lease that counts; 0 for none.
    lease: int = 0
    running: int = 0
    # The instance that had it last.
    last: str = ""

    @property
    def key(self) -> Key:
        return self.group.prompt_id, self.slot

    @property
    def covered(self) -> int:
        """Tokens that there are of it."""
        return max(self.tokens, self.running)


class StepPool:
    """The items of one hint. `open` of them are not finished; those that are neither finished nor leased are
    free. A pool whose step has begun is not `wanted` any more: it only remembers what there is."""

    def __init__(
        self, hint: pb.PutHintRequest, *, coupled: bool = True, per_prompt: int | None = None
    ) -> None:
        """`coupled`: with the seeds of the step. `per_prompt`: samples for each prompt, by default as many as
        the group has; those beyond have seeds of their own."""
        self.hint = hint
        self.wanted = True
        self.items = {item.key: item for item in _items(hint, coupled, per_prompt)}
        self.open = len(self.items)
        self._free: list[dict[Key, Item]] = [{} for _ in range(_waves(self.items.values()))]
        for item in self.items.values():
            self._free[item.wave][item.key] = item
        self.free = len(self.items)

    @property
    def leased(self) -> int:
        """Items that instances have."""
        return self.open - self.free

    def adopt(self, old: StepPool) -> None:
        """Takes over how far the items are that an earlier hint for the step named as well."""
        if old.hint.exactness != self.hint.exactness:
            return
        for key, item in list(self.items.items()):
            known = old.items.get(key)
            if known is None or not _same(known, item):
                continue
            known.group, known.wave = item.group, item.wave
            self.items[key] = known
            del self._free[item.wave][key]
            self.free -= 1
            if known.finished:
                self.open -= 1
            elif not known.lease:
                self._add_free(known)

    def take(self, count: int, instance_id: str, prompts: Collection[str]) -> list[Item]:
        """Takes up to `count` free items, wave by wave; within a wave first those that the instance had
        before, then those of `prompts`, which it has already."""
        taken: list[Item] = []
        for wave in self._free:
            missing = count - len(taken)
            if missing <= 0:
                break
            chosen = list(wave.values())
            if missing < len(chosen):
                chosen.sort(key=lambda item: _affinity(item, instance_id, prompts))
            for item in chosen[:missing]:
                del wave[item.key]
                taken.append(item)
        self.free -= len(taken)
        return taken

    def put_back(self, item: Item) -> None:
        """A leased item is free again."""
        if not item.finished:
            self._add_free(item)

    def finish(self, item: Item) -> None:
        """An item, leased or free, is generated to its end."""
        if item.finished:
            return
        item.finished = True
        self.open -= 1
        if self._free[item.wave].pop(item.key, None) is not None:
            self.free -= 1

    def _add_free(self, item: Item) -> None:
        self._free[item.wave][item.key] = item
        self.free += 1


def _items(hint: pb.PutHintRequest, coupled: bool, per_prompt: int | None) -> Iterator[Item]:
    wave = 0
    for band in _bands(hint.groups):
        counts = [per_prompt or len(group.seeds) for group in band]
        for slot in range(max(counts)):
            for group, count in zip(band, counts, strict=True):
                if slot < count:
                    yield Item(group, slot, _seed(group, slot, coupled), wave)
            wave += 1


def _bands(groups: Collection[pb.HintedGroup]) -> Iterator[list[pb.HintedGroup]]:
    """Groups of similar expected length together, the longest first; of equal length in the hint's order."""
    band: list[pb.HintedGroup] = []
    for group in sorted(groups, key=lambda each: -each.expected_tokens):
        if band and group.expected_tokens < SIMILAR * band[0].expected_tokens:
            yield band
            band = []
        band.append(group)
    if band:
        yield band


def _waves(items: Collection[Item]) -> int:
    return 1 + max((item.wave for item in items), default=-1)


def _seed(group: pb.HintedGroup, slot: int, coupled: bool) -> int:
    seed = int(group.seeds[slot % len(group.seeds)])
    return seed if coupled and slot < len(group.seeds) else uncoupled_seed(seed, slot)


def _same(known: Item, item: Item) -> bool:
    return (
        known.seed == item.seed
        and known.group.prompt_token_ids == item.group.prompt_token_ids
        and known.group.sampling == item.group.sampling
    )


def _affinity(item: Item, instance_id: str, prompts: Collection[str]) -> int:
    if item.last == instance_id:
        return 0
    return 1 if item.group.prompt_id in prompts else 2
