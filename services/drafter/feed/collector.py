"""Collector of training samples: from entries of the feed, through the join, to the replay buffer and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from services.contracts.learner_feed import Fed
from services.drafter.config import DrafterConfig
from services.drafter.feed.buffer import ReplayBuffer
from services.drafter.feed.join import RewardJoin
from services.drafter.learning.data import TrainingSample
from services.drafter.metrics import DrafterMetrics


class UpdateSchedule:
    """Schedule of updates (ReSpec, Algorithm 1 and section 5.3.2); pure.

    Every `interval` training steps an update takes 1/`interval` of the replay buffer, while the next step is being
    generated: Async-1 is an update after every step, on all of the buffer. Steps that end during an update count
    for the next one, which then begins at once and still takes one share: updates do not grow with their delay.
    """

    def __init__(self, interval: int) -> None:
        self.steps = 0
        """Training steps that have ended."""
        self._interval = interval
        self._since_update = 0

    def count_step(self) -> None:
        """Count a training step that has ended."""
        self.steps += 1
        self._since_update += 1

    def is_due(self, samples: int) -> bool:
        """Return True if an update should begin, given the number of samples in the buffer."""
        return self._since_update >= self._interval and samples > 0

    def begin_update(self) -> None:
        """Start to count towards the next update."""
        self._since_update = 0

    def repeat_update(self) -> None:
        """Make an update due at once: the work of the last one is lost."""
        self._since_update = max(self._since_update, self._interval)


class SampleCollector:
    """Samples of one term of leadership.

    `used` are entries that were learned from and of which the feed may not know it yet.
    """

    def __init__(self, config: DrafterConfig, metrics: DrafterMetrics, clock: Callable[[], float]) -> None:
        self.schedule = UpdateSchedule(config.interval)
        self.buffer = ReplayBuffer(config.buffer_tokens, config.held_out_tokens, config.held_out_share)
        self.used: set[str] = set()
        self._join = RewardJoin(
            config.reward_wait_seconds, config.settle_seconds, needs_rewards=config.weighting.needs_rewards
        )
        self.entries = self._join.entries
        self._config = config
        self._metrics = metrics
        self._clock = clock

    @property
    def is_full(self) -> bool:
        """True while so many samples wait for rewards that the feed should not be read."""
        return self._join.waiting >= self._config.waiting_samples

    @property
    def is_due(self) -> bool:
        """True if an update should begin."""
        return self.schedule.is_due(len(self.buffer))

    def resume(self, used: Iterable[str], forced: Iterable[int]) -> None:
        """Adopt what the state of a former leader says of used entries and held-out prompts."""
        self.used = set(used)
        self.buffer.forced.update(forced)

    def take_in(self, entries: Iterable[tuple[str, Fed | None]]) -> None:
        """Take in entries of the feed; None stands for an unreadable one."""
        for entry, fed in entries:
            if fed is None:
                self._metrics.dropped.labels("unreadable").inc()
                self.entries.hold(entry, 0)
            elif entry in self.used:
                # A former process had learned from it and died before it could acknowledge it.
                self.entries.hold(entry, 0)
            else:
                self._buffer(self._join.add(entry, fed, self._clock()))
        self._show()

    def tick(self) -> None:
        """Let time pass: samples whose reward is overdue continue without it, and training steps end."""
        now = self._clock()
        self._buffer(self._join.expire(now))
        for _ in self._join.ended_batches(now):
            self.schedule.count_step()
        self._show()

    def draw(self, seed: int) -> list[TrainingSample]:
        """Draw the samples of an update from the buffer; those that it passes over are dropped."""
        chosen, passed_over = self.buffer.draw(self._config.interval, self._config.update_tokens, seed)
        self.schedule.begin_update()
        self.finish(passed_over, cause="passed_over")
        ends = self._join.take_ends()
        if chosen:
            # Released with the sample: before that, the next leader needs them as much as the samples.
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
            self.schedule.repeat_update()

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
