"""Brings samples and their rewards together. Pure: times are passed in (seconds of one clock).

Rewards come after their samples, as a rule, and late or never if the trainer is slow or does not report. A sample
waits for its reward for a bounded time; then it is used as one about which nothing is known (reward None, which
services/drafter/weighting.py gives weight 1). A reward that comes after that is of no use any more.

A batch is a step of training. It is over when none of its samples waits and nothing of it has come for a moment.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from services.drafter.feed import BatchKey, Fed, FedRewards, FedSample

_MOST_KNOWN = 1 << 17
"""Samples and batches that are remembered, to know a repetition when it comes."""

K = TypeVar("K")
Name = tuple[str, str, str, int]
"""Run, batch, prompt and slot."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A sample with its reward, and the entries of the feed that they came in."""

    sample: FedSample
    reward: float | None
    entries: tuple[str, ...]


@dataclass(slots=True)
class _Waiting:
    entry: str
    sample: FedSample
    since: float


@dataclass(slots=True)
class _Early:
    entry: str
    reward: float
    since: float


@dataclass(slots=True)
class _Batch:
    waiting: int = 0
    last: float = 0.0


class Join:
    """`released` are entries, once for each thing that came out of them and is of no use; `tally` counts rewarded,
    neutral, repeated and unmatched (rewards)."""

    def __init__(self, wait: float, settle: float) -> None:
        """`wait`: longest time that a sample waits for its reward, and a reward for its sample. `settle`: how long
        nothing must come of a batch before it is over."""
        self.released: list[str] = []
        self.tally: Counter[str] = Counter()
        self._wait = wait
        self._settle = settle
        self._waiting: dict[Name, _Waiting] = {}
        self._early: dict[Name, _Early] = {}
        self._known: OrderedDict[Name, None] = OrderedDict()
        self._batches: dict[BatchKey, _Batch] = {}
        self._stepped: OrderedDict[BatchKey, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Samples that wait for their reward."""
        return len(self._waiting)

    def add(self, entry: str, fed: Fed, now: float) -> list[Joined]:
        """Takes an entry in; the samples that now have their reward."""
        if isinstance(fed, FedSample):
            return self._sample(entry, fed, now)
        return self._rewards(entry, fed, now)

    def due(self, now: float) -> list[Joined]:
        """The samples that have waited long enough, oldest first."""
        for name in [name for name, early in self._early.items() if now - early.since > self._wait]:
            self.released.append(self._early.pop(name).entry)
            self.tally["unmatched"] += 1
        late = [name for name, each in self._waiting.items() if now - each.since > self._wait]
        return [self._join(name, None, now) for name in late]

    def over(self, now: float) -> Iterator[BatchKey]:
        """The batches that are over, each once in all."""
        for key, batch in list(self._batches.items()):
            if batch.waiting == 0 and now - batch.last >= self._settle:
                del self._batches[key]
                if key not in self._stepped:
                    _remember(self._stepped, key)
                    yield key

    def _sample(self, entry: str, sample: FedSample, now: float) -> list[Joined]:
        name = sample.key
        if name in self._known:
            self.tally["repeated"] += 1
            self.released.append(entry)
            return []
        _remember(self._known, name)
        self._waiting[name] = _Waiting(entry, sample, now)
        batch = self._batches.setdefault(sample.batch, _Batch())
        batch.waiting, batch.last = batch.waiting + 1, now
        early = self._early.pop(name, None)
        return [] if early is None else [self._join(name, early, now)]

    def _rewards(self, entry: str, rewards: FedRewards, now: float) -> list[Joined]:
        joined = []
        for (prompt_id, slot), reward in rewards.rewards.items():
            name = (*rewards.batch, prompt_id, slot)
            if name in self._waiting:
                joined.append(self._join(name, _Early(entry, reward, now), now))
            elif name in self._known or name in self._early:
                self.tally["repeated"] += 1
                self.released.append(entry)
            else:
                self._early[name] = _Early(entry, reward, now)
        return joined

    def _join(self, name: Name, reward: _Early | None, now: float) -> Joined:
        waiting = self._waiting.pop(name)
        batch = self._batches[waiting.sample.batch]
        batch.waiting, batch.last = batch.waiting - 1, now
        if reward is None:
            self.tally["neutral"] += 1
            return Joined(waiting.sample, None, (waiting.entry,))
        self.tally["rewarded"] += 1
        return Joined(waiting.sample, reward.reward, (waiting.entry, reward.entry))


def _remember(known: OrderedDict[K, None], key: K) -> None:
    known[key] = None
    while len(known) > _MOST_KNOWN:
        known.popitem(last=False)
