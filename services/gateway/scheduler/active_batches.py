"""Batches in work: the state of each in this process, and the limits on all of them.

The limits are on unfinished samples and their tokens, in all and for each access token.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from services.contracts.errors import ResourceExhausted
from services.contracts.gateway_keys import BatchKey
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.work_link import Attempt, WorkLink
from services.gateway.state.calls import WaitingCalls
from services.gateway.state.rollout_batch import Account, RolloutBatch
from services.platform.observability import tracing
from services.platform.observability.tracing import NO_SPAN, TraceSpan
from services.platform.security.caller import TokenHolder
from services.platform.tasks import Notifier

_QUOTA_RETRY_SECONDS = 1.0
"""Seconds after which a caller above a quota should try again; the SDK then doubles its waits."""


@dataclass(slots=True, eq=False)
class InUse:
    """Unfinished samples of a token and the most tokens that they may come to, with its limits as last seen."""

    samples: int = 0
    tokens: int = 0
    caller: TokenHolder | None = None


class Accounts:
    """Work and limits of all access tokens. A caller that is a service has no token of a user, and no account."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._by_name: dict[str, InUse] = {}
        self._metrics = metrics

    def of(self, name: str) -> InUse:
        """Return the work of a token."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = InUse()
            for gauge, field in (("grant_samples", "samples"), ("grant_tokens", "tokens")):
                getattr(self._metrics, gauge).labels(name).set_function(partial(getattr, found, field))
        return found

    def note(self, caller: TokenHolder, model_len: int) -> Account:
        """Return the account of a caller, and apply the caller's limits from now on."""
        self.of(caller.name).caller = caller
        return Account(caller.name, model_len)

    def check(self, account: Account | None, samples: int, tokens: int) -> None:
        """Check that `samples` samples with `tokens` tokens may begin.

        ResourceExhausted names the limit, the use, and what to do.
        """
        if account is None:
            return
        used = self.of(account.name)
        if (caller := used.caller) is None:
            return
        for resource, most, now, more, what in (
            ("max_queued_samples", caller.max_queued_samples, used.samples, samples, "unfinished samples"),
            (
                "max_queued_tokens",
                caller.max_queued_tokens,
                used.tokens,
                tokens,
                "tokens of unfinished samples",
            ),
        ):
            if most is None or not more or now + more <= most:
                continue
            never = more > most
            way_out = f"ask for at most {most} at once" if never else "try again when some have ended"
            raise ResourceExhausted(
                resource,
                f"{account.name} has {now} {what}; {more} more would exceed {most}, the {resource} of its token: "
                f"{way_out}",
                retry_after=None if never else _QUOTA_RETRY_SECONDS,
                token=account.name,
                limit=str(most),
                used=str(now),
                wanted=str(more),
            )


# Target event rate over all readers (per second, for samples of several seconds), and bounds of the seconds between
# two events to one reader.
_DELIVERIES = 200.0
_LEAST_INTERVAL, _MOST_INTERVAL = 0.02, 0.5
# Bytes of a token and its log-probability, and seconds for which a count of them is reused.
_TOKEN_BYTES, _COUNT_SECONDS = 8, 0.1


class WorkLeft:
    """Predicted tokens that the samples of a batch still need, kept up to date sample by sample."""

    def __init__(self) -> None:
        self.waiting_samples = self.running_samples = 0
        self.waiting_tokens = self.running_tokens = 0.0
        # Sample index -> its tokens, and True if it waits for an instance.
        self._samples: dict[int, tuple[float, bool]] = {}

    def set(self, index: int, tokens: float, *, waiting: bool) -> None:
        """Set the tokens that a sample needs."""
        self.end(index)
        self._samples[index] = (tokens, waiting)
        self._add(1, tokens, waiting)

    def run(self, index: int, generated: int = 0) -> None:
        """Record that a sample runs and has generated tokens. It needs at least one more until it ends."""
        tokens, _ = self._samples.get(index, (1.0, False))
        self.set(index, max(1.0, tokens - generated), waiting=False)

    def end(self, index: int) -> None:
        """Record that a sample needs no more tokens."""
        known = self._samples.pop(index, None)
        if known is not None:
            self._add(-1, -known[0], known[1])

    def _add(self, samples: int, tokens: float, waiting: bool) -> None:
        # Without samples exactly 0: rounding errors must not add up.
        if waiting:
            self.waiting_samples += samples
            self.waiting_tokens = self.waiting_tokens + tokens if self.waiting_samples else 0.0
        else:
            self.running_samples += samples
            self.running_tokens = self.running_tokens + tokens if self.running_samples else 0.0


@dataclass(slots=True, eq=False)
class RunningBatch:
    """One batch in work. `order` ranks its samples after the samples of earlier batches.

    A private batch is the single sample of a Generate call: it is not journaled, and ends with the call.
    """

    batch: RolloutBatch
    order: int
    private: bool = False
    # Number of finished samples in the journal, which may be delivered.
    events: int = 0
    # True if its samples count in the report of their step.
    in_step: bool = True
    changed: Notifier = field(default_factory=Notifier)
    # Loop time at which `notify_soon` last woke readers; True if it is about to.
    _notified_at: float = -math.inf
    _notify_due: bool = False
    timers: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    _timer_numbers: Iterator[int] = field(default_factory=count)
    # Sample index -> its link and its handle there.
    places: dict[int, tuple[WorkLink, int]] = field(default_factory=dict)
    left: WorkLeft = field(default_factory=WorkLeft)
    # Samples whose tool calls are in the journal, and which wait for their environments.
    calls: WaitingCalls = field(default_factory=WaitingCalls)
    # Sample index -> number of tokens that the journal must have, and the future that waits for them.
    unsafe: dict[int, tuple[int, asyncio.Future[None]]] = field(default_factory=dict)
    # True once its deadline has passed.
    expired: bool = False
    # True once this process no longer works on the batch.
    dropped: bool = False
    # Streams that wait for its samples, and the monotonic time at which a trainer last used it.
    readers: int = 0
    used_at: float = field(default_factory=time.monotonic)
    # Lasts until the last delivery.
    trace: TraceSpan = NO_SPAN

    def __post_init__(self) -> None:
        self.trace = tracing.begin(
            "batch", root=True, run_id=self.batch.key[0], step=self.batch.step, samples=self.batch.unfinished
        )

    def begin_span(self, index: int) -> TraceSpan:
        """Begin the span of a sample's attempt, which lasts until the sample leaves the instance."""
        sample = self.batch.samples[index]
        return tracing.begin(
            "sample",
            self.trace.traceparent,
            prompt_id=self.batch.group_of(index).prompt_id,
            slot=sample.slot,
            attempt=sample.attempt,
            instance_id=sample.instance_id,
            prefix_tokens=len(sample.tokens),
        )

    @contextmanager
    def read(self) -> Iterator[None]:
        """Count a stream while it waits for samples."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            self.used_at = time.monotonic()

    def wait_safe(self, index: int) -> asyncio.Future[None]:
        """Return a future that is done once the journal has all current tokens of the sample, or its end.

        The future is cancelled with the batch.
        """
        known = self.unsafe.get(index)
        waits = asyncio.get_running_loop().create_future() if known is None else known[1]
        self.unsafe[index] = (len(self.batch.samples[index].tokens), waits)
        return waits

    def safe(self, index: int, tokens: float) -> None:
        """Record that the journal has `tokens` tokens of a sample; inf: its end."""
        wanted, waits = self.unsafe.get(index, (math.inf, None))
        if waits is not None and tokens >= wanted:
            del self.unsafe[index]
            if not waits.done():
                waits.set_result(None)

    def call_later(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        """Call `do` after a time, unless the timers are stopped before."""
        number = next(self._timer_numbers)
        self.timers[number] = asyncio.get_running_loop().call_later(seconds, self._fire, number, do, args)

    def _fire(self, number: int, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        del self.timers[number]
        do(*args)

    def notify_soon(self, interval: float) -> None:
        """Wake the readers, at most once in `interval` seconds."""
        wait = self._notified_at + interval - asyncio.get_running_loop().time()
        if wait <= 0.0:
            self._notify()
        elif not self._notify_due:
            self._notify_due = True
            self.call_later(wait, self._notify)

    def _notify(self) -> None:
        self._notify_due, self._notified_at = False, asyncio.get_running_loop().time()
        self.changed.notify()

    def stop_timers(self) -> None:
        """Cancel the deadline, all other timers, and all futures that wait for the journal."""
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()
        for _, waits in self.unsafe.values():
            waits.cancel()
        self.unsafe.clear()


# A sample of a batch in work, by its index.
SampleRef = tuple[RunningBatch, int]


class ActiveBatches:
    """All batches in work, by key, and the signals of their progress.

    At most `max_samples` samples may be unfinished, and none are accepted while the tokens of unfinished samples
    take more than `max_token_bytes`.
    """

    def __init__(self, metrics: GatewayMetrics, max_samples: int, max_token_bytes: int = sys.maxsize) -> None:
        self.by_key: dict[BatchKey, RunningBatch] = {}
        self.accounts = Accounts(metrics)
        # Samples that have not ended or are about to be accepted.
        self.unfinished = 0
        # Samples in memory: all samples of the batches in work, ended or not.
        self.held = 0
        # Batches in work whose samples call tools.
        self.with_tools = 0
        # Finished batches that the journal still lists as unfinished.
        self.finished: asyncio.Queue[BatchKey] = asyncio.Queue()
        # Set whenever a sample was placed, waits again or has ended; cleared by the task that waits for it.
        self.progress = asyncio.Event()
        # Batch -> unix time at which it was accepted, or closed if it had been opened; inf while it is open.
        # Without Generate calls, of which there may be thousands.
        self._accepted: dict[BatchKey, float] = {}
        self._metrics = metrics
        self._max_samples = max_samples
        self._max_token_bytes = max_token_bytes
        # Bytes of the tokens of unfinished samples, and the time of that count.
        self._token_bytes, self._counted_at = 0, -math.inf
        metrics.calling.set_function(lambda: sum(len(running.calls) for running in self.by_key.values()))
        metrics.unfinished_tokens.set_function(lambda: self.token_bytes() / max_token_bytes)

    def add(self, running: RunningBatch) -> None:
        """Add a batch."""
        self.by_key[running.batch.key] = running
        self.with_tools += running.batch.tools is not None
        if not running.private:
            self._accepted[running.batch.key] = math.inf if running.batch.open else running.batch.accepted_at
        self.held += len(running.batch.samples)
        self._show()

    def grow(self, batch: RolloutBatch, samples: int, most_tokens: int) -> None:
        """Count samples that were added to a batch, and the most tokens that they may have."""
        self.count(batch.account, samples, most_tokens)
        self.held += samples

    def count(self, account: Account | None, samples: int, most_tokens: int) -> None:
        """Add to the unfinished samples and to their account; negative numbers: samples end or are dropped."""
        self.unfinished += samples
        if account is not None:
            used = self.accounts.of(account.name)
            used.samples += samples
            used.tokens += most_tokens

    def close(self, running: RunningBatch) -> None:
        """Record that nothing can be added to a batch any more."""
        running.batch.open = False
        self._accepted[running.batch.key] = time.time()
        self._show()

    def use(self, key: BatchKey) -> None:
        """Record that a trainer uses a batch now."""
        if running := self.by_key.get(key):
            running.used_at = time.monotonic()

    def remove(self, running: RunningBatch) -> None:
        """Remove a batch."""
        del self.by_key[running.batch.key]
        self.with_tools -= running.batch.tools is not None
        self._accepted.pop(running.batch.key, None)
        self.held -= len(running.batch.samples)
        self._show()

    @property
    def delivery_interval(self) -> float:
        """Least seconds between two events to one reader, so that all readers together get `_DELIVERIES` a second.

        It is far below the time that a sample takes, so it delays no trainer noticeably.
        """
        return min(max(len(self._accepted) / _DELIVERIES, _LEAST_INTERVAL), _MOST_INTERVAL)

    def of(self, attempt: Attempt) -> RunningBatch | None:
        """Return the batch of an attempt, if it is still in work."""
        running = self.by_key.get(attempt.batch.key)
        return running if running is not None and running.batch is attempt.batch else None

    def check_batches(self) -> None:
        """Check that another batch may be opened. ResourceExhausted if there are too many."""
        if len(self.by_key) >= self._max_samples:
            raise ResourceExhausted(
                "batches", f"{len(self.by_key)} batches are in work, the most that may be", retry_after=5.0
            )

    @contextmanager
    def reserve(self, samples: int, account: Account | None = None, most_tokens: int = 0) -> Iterator[None]:
        """Count samples, which may have `most_tokens` tokens, as unfinished while they are being recorded.

        So neither the limits nor a weight update overlook them. ResourceExhausted above a limit of the queue or of
        the account.
        """
        self.accounts.check(account, samples, most_tokens)
        if self.unfinished + samples > self._max_samples:
            raise ResourceExhausted(
                "queued_samples",
                f"{samples} more samples on top of {self.unfinished} unfinished ones would exceed "
                f"{self._max_samples}",
                retry_after=None if samples > self._max_samples else 5.0,
            )
        if self.token_bytes() > self._max_token_bytes:
            raise ResourceExhausted(
                "unfinished_tokens",
                f"the tokens of {self.unfinished} unfinished samples have {self._token_bytes} bytes; more samples "
                f"are accepted below {self._max_token_bytes}",
                retry_after=5.0,
            )
        self.count(account, samples, most_tokens)
        try:
            yield
        finally:
            self.count(account, -samples, -most_tokens)

    def token_bytes(self) -> int:
        """Return the bytes of the tokens of unfinished samples, counted within the last 0.1 s."""
        now = time.monotonic()
        if now - self._counted_at > _COUNT_SECONDS:
            # Not at every call: there may be thousands of batches, of Generate calls.
            held = sum(running.batch.held_tokens for running in self.by_key.values())
            self._token_bytes, self._counted_at = _TOKEN_BYTES * held, now
        return self._token_bytes

    def _show(self) -> None:
        self._metrics.batches.set(len(self.by_key))
        oldest = min(self._accepted.values(), default=math.inf)
        self._metrics.oldest_batch.set(0.0 if math.isinf(oldest) else oldest)
