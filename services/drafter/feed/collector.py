"""Collect training samples from feed entries: join them with rewards, buffer them, and decide when to update.

Everything here is pure: times are passed in (seconds). `SampleCollector` puts the parts together.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Generic, TypeVar

from services.contracts.learner import BatchKey, Fed, FedBatchEnd, FedRewards, FedSample
from services.drafter.config import DrafterConfig
from services.drafter.learning.data import TrainingSample
from services.drafter.metrics import DrafterMetrics

_MAX_KNOWN = 1 << 17
"""Most samples and batches that are remembered to recognise repetitions."""

T = TypeVar("T")
K = TypeVar("K")
SampleKey = tuple[str, str, str, int]
"""Run, batch, prompt and slot."""
_HASH_RANGE = 1 << 64


class _SampleQueue(deque[TrainingSample]):
    """Samples, oldest first, of at most `most` tokens after `trim`. `tokens` includes prompts."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.tokens = 0
        self._most = most

    def push(self, sample: TrainingSample) -> None:
        """Add the latest sample."""
        self.append(sample)
        self.tokens += sample.length

    def trim(self) -> list[TrainingSample]:
        """Drop the oldest samples above the bound, but keep at least one, and return them."""
        dropped = []
        while self.tokens > self._most and len(self) > 1:
            dropped.append(self.popleft())
            self.tokens -= dropped[-1].length
        return dropped

    def empty(self) -> list[TrainingSample]:
        """Remove all samples and return them."""
        samples = list(self)
        self.clear()
        self.tokens = 0
        return samples


class ReplayBuffer:
    """Replay buffer Q (ReSpec, Algorithm 1) and the samples held out of it.

    A hash of its tokens decides whether a prompt is learned from or held out, so drafters are never evaluated on a
    prompt that was trained on, in any run, epoch or process. Both sides are bounded in tokens and drop their oldest
    samples: for Q this is back-pressure (samples arrive faster than they are learned from), and the held-out ones
    stay recent.

    `forced` are hashes of prompts that are held out although the share does not include them; the state of the
    learner keeps them for the next process.
    """

    def __init__(
        self, most_tokens: int, held_out_tokens: int, share: float, forced: Iterable[int] = ()
    ) -> None:
        """Start empty, with bounds in tokens; `share` of the prompts, in (0, 1), is held out."""
        self.forced = set(forced)
        self._share = share
        self._queue = _SampleQueue(most_tokens)
        self._held_out = _SampleQueue(held_out_tokens)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def tokens(self) -> int:
        """Number of tokens in Q, prompts included."""
        return self._queue.tokens

    @property
    def held_out(self) -> Sequence[TrainingSample]:
        """Held-out samples, oldest first."""
        return self._held_out

    def add(self, sample: TrainingSample) -> tuple[list[TrainingSample], list[TrainingSample]]:
        """Add a sample and return the samples dropped for it: from Q, and from the held-out ones."""
        self._push(sample)
        return self._queue.trim(), self._held_out.trim()

    def draw(
        self, interval: int, most_tokens: int, seed: int
    ) -> tuple[list[TrainingSample], list[TrainingSample]]:
        """Empty Q and choose 1/`interval` of it at random, at least one sample, the same for the same seed.

        Of the chosen samples the latest are kept, at most `most_tokens` tokens or one sample. Returns the samples
        to learn from and the other ones, oldest first.
        """
        self._ensure_held_out()
        queue = self._queue.empty()
        count = -(-len(queue) // interval)
        places = sorted(Random(seed).sample(range(len(queue)), count))
        chosen: list[TrainingSample] = []
        tokens = 0
        for place in reversed(places):
            tokens += queue[place].length
            if chosen and tokens > most_tokens:
                break
            chosen.append(queue[place])
        kept = {id(each) for each in chosen}
        return chosen[::-1], [each for each in queue if id(each) not in kept]

    def _push(self, sample: TrainingSample) -> None:
        digest = prompt_hash(sample.prompt)
        is_held_out = digest in self.forced or digest < self._share * _HASH_RANGE
        (self._held_out if is_held_out else self._queue).push(sample)

    def _ensure_held_out(self) -> None:
        """Hold out one prompt if the hash holds out none, as can happen with few prompts."""
        if self._held_out or not self._queue:
            return
        digests = {prompt_hash(each.prompt) for each in self._queue}
        if len(digests) < 2:
            return
        self.forced.add(min(digests))
        for sample in self._queue.empty():
            self._push(sample)


def prompt_hash(prompt: Sequence[int]) -> int:
    """Return a uniform 64-bit hash of the tokens of a prompt."""
    digest = hashlib.blake2b(array("I", prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


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


class SampleCollector:
    """Samples of one term of leadership, and the schedule of updates (ReSpec, Algorithm 1 and section 5.3.2).

    Every `interval` training steps an update takes 1/`interval` of the replay buffer, while the next step is being
    generated: Async-1 is an update after every step, on all of the buffer. Steps that end during an update count
    for the next one, which then begins at once and still takes one share: updates do not grow with their delay.

    `steps` counts the training steps that have ended. `used` are entries that were learned from and may not be
    acknowledged yet.
    """

    def __init__(self, config: DrafterConfig, metrics: DrafterMetrics, clock: Callable[[], float]) -> None:
        self.steps = 0
        self.buffer = ReplayBuffer(config.buffer_tokens, config.held_out_tokens, config.held_out_share)
        self.used: set[str] = set()
        self._join = RewardJoin(
            config.reward_wait_seconds, config.settle_seconds, needs_rewards=config.weighting.needs_rewards
        )
        self.entries = self._join.entries
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._steps_since_update = 0

    @property
    def is_full(self) -> bool:
        """True while `waiting_samples` or more wait for their reward: the feed should not be read."""
        return self._join.waiting >= self._config.waiting_samples

    @property
    def is_due(self) -> bool:
        """True if an update should begin."""
        return self._steps_since_update >= self._config.interval and len(self.buffer) > 0

    def resume(self, used: Iterable[str], forced: Iterable[int]) -> None:
        """Adopt used entries and held-out prompts from the state of a former leader."""
        self.used = set(used)
        self.buffer.forced.update(forced)

    def take_in(self, entries: Iterable[tuple[str, Fed | None]]) -> None:
        """Add entries of the feed; None stands for an unreadable one."""
        for entry, fed in entries:
            if fed is None:
                self._metrics.dropped.labels("unreadable").inc()
                self.entries.hold(entry, 0)
            elif entry in self.used:
                # A former process learned from it and died before it could acknowledge it.
                self.entries.hold(entry, 0)
            else:
                self._buffer(self._join.add(entry, fed, self._clock()))
        self._show()

    def tick(self) -> None:
        """Release samples whose reward is overdue, and count the training steps that have ended."""
        now = self._clock()
        self._buffer(self._join.expire(now))
        ended = len(self._join.ended_batches(now))
        self.steps += ended
        self._steps_since_update += ended
        self._show()

    def draw(self, seed: int) -> list[TrainingSample]:
        """Begin an update: draw its samples from the buffer, and drop the samples outside its share."""
        chosen, passed_over = self.buffer.draw(self._config.interval, self._config.update_tokens, seed)
        self._steps_since_update = 0
        self.finish(passed_over, cause="passed_over")
        ends = self._join.take_ends()
        if chosen:
            # Released with the sample: until then the next leader needs them as well.
            chosen[-1] = replace(chosen[-1], entries=(*chosen[-1].entries, *ends))
        else:
            self.entries.release(ends)
        return chosen

    def finish(self, samples: Sequence[TrainingSample], *, cause: str = "") -> None:
        """Release samples that are part of a durable state, or were dropped for a cause."""
        for each in samples:
            self.entries.release(each.entries)
        if cause:
            self._metrics.dropped.labels(cause).inc(len(samples))

    def return_to_buffer(self, samples: Sequence[TrainingSample]) -> None:
        """Put back the samples of an update that was lost, and make another one due."""
        self._buffer(samples)
        if samples:
            self._steps_since_update = max(self._steps_since_update, self._config.interval)

    def _buffer(self, samples: Sequence[TrainingSample]) -> None:
        for each in samples:
            surplus, retired = self.buffer.add(each)
            self.finish(surplus, cause="surplus")
            self.finish(retired)

    def _show(self) -> None:
        tally, self._join.tally = self._join.tally, Counter()
        for name in ("rewarded", "neutral"):
            self._metrics.samples.labels(name).inc(tally[name])
        self._metrics.dropped.labels("repeated").inc(tally["repeated"])
        self._metrics.unmatched.inc(tally["unmatched"])
        self._metrics.buffered.set(self.buffer.tokens)
        self._metrics.held_out.set(len(self.buffer.held_out))
        self._metrics.waiting.set(self._join.waiting)
