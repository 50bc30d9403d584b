"""What came in and what became of it: the feed joined with its rewards, the replay buffer, and what is done with.

Between the stream and training. It holds no decision of its own: those are in join.py, buffer.py and acks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from services.drafter.acks import Acks
from services.drafter.buffer import ReplayBuffer
from services.drafter.config import DrafterConfig
from services.drafter.feed import Fed, FedRewards
from services.drafter.join import Join, Joined
from services.drafter.metrics import DrafterMetrics
from services.drafter.rollout import Rollout
from services.drafter.schedule import Schedule


class Collection:
    """One term's. `acks` has what may be acknowledged; `used` are entries that were learned from and for which the
    feed may not know it."""

    def __init__(
        self,
        config: DrafterConfig,
        metrics: DrafterMetrics,
        clock: Callable[[], float],
        *,
        used: Iterable[str] = (),
        forced: Iterable[int] = (),
    ) -> None:
        self.acks = Acks()
        self.schedule = Schedule(config.interval)
        self.buffer = ReplayBuffer(
            config.buffer_tokens, config.held_out_tokens, config.held_out_share, forced
        )
        self.used = set(used)
        self._join = Join(config.reward_wait_seconds, config.settle_seconds)
        self._metrics = metrics
        self._clock = clock
        self._most_waiting = config.waiting_samples
        self._told: dict[str, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be read for now."""
        return self._join.waiting >= self._most_waiting

    @property
    def waiting(self) -> int:
        """Samples that wait for their reward."""
        return self._join.waiting

    def take_in(self, entries: Iterable[tuple[str, Fed | None]]) -> None:
        """Entries of the feed, None for what is no entry."""
        for entry, fed in entries:
            if fed is None:
                self._metrics.dropped.labels("unreadable").inc()
                self.acks.hold(entry, 0)
            elif entry in self.used:
                # Of an earlier process, which had no time left to acknowledge it.
                self.acks.hold(entry, 0)
            else:
                self.acks.hold(entry, len(fed.rewards) if isinstance(fed, FedRewards) else 1)
                self._keep(self._join.add(entry, fed, self._clock()))
        self._settle()

    def tick(self) -> None:
        """Time has passed: samples whose reward does not come go on without, and steps end."""
        now = self._clock()
        self._keep(self._join.due(now))
        for _ in self._join.over(now):
            self.schedule.step_over()
        self._settle()

    def finish(self, joined: Iterable[Joined], *, cause: str = "") -> None:
        """These are done with: part of a durable state, or dropped for a cause."""
        done = list(joined)
        for each in done:
            self.acks.release(each.entries)
        if cause:
            self._metrics.dropped.labels(cause).inc(len(done))

    def return_to_buffer(self, joined: Sequence[Joined]) -> None:
        """An update on these is lost; another is due."""
        self._keep(joined)
        if joined:
            self.schedule.again()

    def acknowledged(self, entries: Sequence[str]) -> None:
        """The feed knows."""
        self.used.difference_update(entries)

    def _keep(self, joined: Sequence[Joined]) -> None:
        for each in joined:
            surplus, retired = self.buffer.add(each)
            self.finish(surplus, cause="surplus")
            self.finish(retired)

    def _settle(self) -> None:
        released, self._join.released = self._join.released, []
        self.acks.release(released)
        counters = {
            "rewarded": self._metrics.samples.labels("rewarded"),
            "neutral": self._metrics.samples.labels("neutral"),
            "repeated": self._metrics.dropped.labels("repeated"),
            "unmatched": self._metrics.unmatched,
        }
        for name, counter in counters.items():
            counter.inc(self._join.tally[name] - self._told.get(name, 0))
        self._told = dict(self._join.tally)
        self._metrics.buffered.set(self.buffer.tokens)
        self._metrics.held_out.set(len(self.buffer.held_out))
        self._metrics.waiting.set(self._join.waiting)


def rollout_of(joined: Joined) -> Rollout:
    """A sample as the learner gets it."""
    sample = joined.sample
    return Rollout(
        run_id=sample.batch[0],
        batch_id=sample.batch[1],
        prompt_id=sample.prompt_id,
        slot=sample.slot,
        policy_version=sample.policy_version,
        prompt=sample.prompt,
        response=sample.response,
        reward=joined.reward,
        seed=sample.seed,
    )
