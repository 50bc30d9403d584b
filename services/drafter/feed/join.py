"""Join of samples and their rewards, and the feed entries that are done. Pure: times are passed in (seconds).

Rewards usually arrive after their samples; late or never if the trainer is slow or does not report. A sample waits
for its reward for a bounded time and is used with reward None after it. A reward that arrives later is dropped.

A batch is a training step. It is over when none of its samples waits and nothing of it has arrived for a moment.

Where rewards are not needed no sample waits for one. Then a batch is over when all its samples have ended, when a
reward of it comes (the trainer would not judge a batch that goes on), or when nothing of it has arrived for as
long as a reward would be waited for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.contracts.learner_feed import BatchKey, Fed, FedBatchEnd, FedRewards, FedSample
from services.drafter.learning.data import TrainingSample

_MAX_KNOWN = 1 << 17
"""Most samples and batches that are remembered to recognise repetitions."""

T = TypeVar("T")
K = TypeVar("K")
SampleKey = tuple[str, str, str, int]
"""Run, batch, prompt and slot."""


class HeldEntries:
    """Feed entries by how many of their samples or rewards are still in use; pure.

    An entry may be acknowledged when everything in it is part of a durable state or was dropped.
    """

    def __init__(self) -> None:
        self._holds: dict[str, int] = {}
        self._done: list[str] = []

    def __len__(self) -> int:
        """Return the number of entries in use."""
        return len(self._holds)

    def hold(self, entry: str, count: int = 1) -> None:
        """Count the samples or rewards of an entry; an entry with none is done."""
        if count:
            self._holds[entry] = self._holds.get(entry, 0) + count
        elif entry not in self._holds:
            self._done.append(entry)

    def release(self, entries: Iterable[str]) -> None:
        """Release one sample or reward of each entry. Entries that are not held are ignored."""
        for entry in entries:
            left = self._holds.get(entry, 0) - 1
            if left > 0:
                self._holds[entry] = left
            elif left == 0:
                del self._holds[entry]
                self._done.append(entry)

    def take_done(self) -> list[str]:
        """Return the entries that became done since the last call."""
        done, self._done = self._done, []
        return done

    def put_back(self, entries: Iterable[str]) -> None:
        """Return entries that could not be acknowledged to those that are done."""
        self._done.extend(entries)


@dataclass(slots=True)
class _Arrived(Generic[T]):
    entry: str
    value: T
    since: float


@dataclass(slots=True)
class _BatchProgress:
    waiting: int = 0
    last: float = 0.0
    ended: bool = False


class RewardJoin:
    """Join of samples with their rewards. `entries` are in use until the users of the samples release them.

    `tally` counts samples that were rewarded or neutral (without reward), and rewards that were repeated or
    unmatched.
    """

    def __init__(self, wait: float, settle: float, *, needs_rewards: bool = True) -> None:
        """Start empty.

        Args:
            wait: longest time that a sample waits for its reward, and a reward for its sample.
            settle: time without news of a batch after which the batch is over.
            needs_rewards: False: samples come out at once, without their reward.
        """
        self.entries = HeldEntries()
        self.tally: Counter[str] = Counter()
        self._wait = wait
        self._settle = settle
        self._needs_rewards = needs_rewards
        # Entries that said of a batch in use that it is over.
        self._ends: list[str] = []
        self._waiting: dict[SampleKey, _Arrived[FedSample]] = {}
        self._early: dict[SampleKey, _Arrived[float]] = {}
        self._known: OrderedDict[SampleKey, None] = OrderedDict()
        self._batches: dict[BatchKey, _BatchProgress] = {}
        self._stepped: OrderedDict[BatchKey, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Number of samples that wait for their reward."""
        return len(self._waiting)

    def add(self, entry: str, fed: Fed, now: float) -> list[TrainingSample]:
        """Take in an entry and return the samples that now have their reward, or need none."""
        if isinstance(fed, FedSample):
            self.entries.hold(entry)
            return self._add_sample(entry, fed, now)
        if not self._needs_rewards:
            self._end(entry, fed.batch)
            return []
        if isinstance(fed, FedBatchEnd):
            self.entries.hold(entry, 0)
            return []
        self.entries.hold(entry, len(fed.rewards))
        return self._add_rewards(entry, fed, now)

    def expire(self, now: float) -> list[TrainingSample]:
        """Return the samples that have waited long enough, oldest first, and drop such rewards."""
        for key in [key for key, early in self._early.items() if now - early.since > self._wait]:
            self.entries.release([self._early.pop(key).entry])
            self.tally["unmatched"] += 1
        late = [key for key, each in self._waiting.items() if now - each.since > self._wait]
        return [self._joined(key, None, now) for key in late]

    def ended_batches(self, now: float) -> list[BatchKey]:
        """Return the batches that are over, each once in all."""
        ended = []
        quiet = self._settle if self._needs_rewards else self._wait
        for key, batch in list(self._batches.items()):
            if batch.ended or (batch.waiting == 0 and now - batch.last >= quiet):
                del self._batches[key]
                if key not in self._stepped:
                    _remember(self._stepped, key)
                    ended.append(key)
        return ended

    def take_ends(self) -> tuple[str, ...]:
        """Return the entries that ended batches since the last call, for one who releases them later.

        As long as they are held, whoever reads the samples of the batch again also learns that it is over.
        """
        ends, self._ends = tuple(self._ends), []
        return ends

    def _end(self, entry: str, key: BatchKey) -> None:
        batch = self._batches.get(key)
        if batch is None or batch.ended:
            self.entries.hold(entry, 0)
            return
        batch.ended = True
        self.entries.hold(entry)
        self._ends.append(entry)

    def _add_sample(self, entry: str, sample: FedSample, now: float) -> list[TrainingSample]:
        key = sample.key
        if key in self._known:
            self._drop_repeated(entry)
            return []
        _remember(self._known, key)
        self._waiting[key] = _Arrived(entry, sample, now)
        batch = self._batches.setdefault(sample.batch, _BatchProgress())
        batch.waiting, batch.last = batch.waiting + 1, now
        if not self._needs_rewards:
            return [self._joined(key, None, now)]
        early = self._early.pop(key, None)
        return [] if early is None else [self._joined(key, early, now)]

    def _add_rewards(self, entry: str, rewards: FedRewards, now: float) -> list[TrainingSample]:
        joined = []
        for (prompt_id, slot), reward in rewards.rewards.items():
            key = (*rewards.batch, prompt_id, slot)
            if key in self._waiting:
                joined.append(self._joined(key, _Arrived(entry, reward, now), now))
            elif key in self._known or key in self._early:
                self._drop_repeated(entry)
            else:
                self._early[key] = _Arrived(entry, reward, now)
        return joined

    def _drop_repeated(self, entry: str) -> None:
        self.tally["repeated"] += 1
        self.entries.release([entry])

    def _joined(self, key: SampleKey, reward: _Arrived[float] | None, now: float) -> TrainingSample:
        waiting = self._waiting.pop(key)
        sample = waiting.value
        batch = self._batches[sample.batch]
        batch.waiting, batch.last = batch.waiting - 1, now
        self.tally["neutral" if reward is None else "rewarded"] += 1
        return TrainingSample(
            *key,
            policy_version=sample.policy_version,
            prompt=sample.prompt,
            response=sample.response,
            reward=None if reward is None else reward.value,
            seed=sample.seed,
            entries=(waiting.entry,) if reward is None else (waiting.entry, reward.entry),
        )


def _remember(known: OrderedDict[K, None], key: K) -> None:
    known[key] = None
    while len(known) > _MAX_KNOWN:
        known.popitem(last=False)
