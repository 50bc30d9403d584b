"""Samples of a batch, submitted whole or open, as the synchronous client reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline import types as t
from paceline.blocking import Face, blocking, blocking_stream, finish, iterate
from paceline.open_batch import AsyncOpenBatch
from paceline.rollout import AsyncRollout


class Rollout(Face[AsyncRollout]):
    """The samples of a submitted batch. Each is given once, over all iterations together."""

    @property
    def batch(self) -> t.Batch:
        """The batch as it was submitted."""
        return self._core.batch

    @property
    def submitted(self) -> t.Submitted:
        """The gateway's answer to the batch."""
        return self._core.submitted

    @property
    def cursor(self) -> int:
        """Cursor behind the last sample that was given."""
        return self._core.cursor

    @property
    def complete(self) -> bool:
        """True if every sample was given."""
        return self._core.complete

    def stats(self) -> dict[str, float]:
        """Return figures of the samples that were given so far; those of `run.stats`, of this batch alone."""
        return self._core.stats()

    def __len__(self) -> int:
        """Return the number of samples of the batch."""
        return len(self._core)

    def __iter__(self) -> Iterator[t.Sample]:
        return iterate(aiter(self._core))

    by_group = blocking_stream(AsyncRollout.by_group)
    ack = blocking(AsyncRollout.ack)
    cancel = blocking(AsyncRollout.cancel)
    report_rewards = blocking(AsyncRollout.report_rewards)


class OpenBatch(Rollout):
    """The samples of an open batch. Each is given once, over all iterations together.

    Iterations end when the batch is closed and every sample was given.
    """

    _core: AsyncOpenBatch

    def add(self, groups: Iterable[t.Group]) -> int:
        """Add groups, and return how many samples they have; those of groups that are there are not counted.

        A prompt id names one group of the batch: the same group again is passed over, so a call that failed may be
        repeated. Waits while the gateway is full.

        FailedPreconditionError: nothing can be added. Reasons: BATCH_CLOSED, after `close` or `cancel`, after the
        deadline, or where the gateway has closed a batch that nobody had to do with; BATCH_STALE, where newer
        versions were published than `max_staleness` allows; VERSION_MISMATCH, for a batch without one.
        ResourceExhaustedError: the batch is as large as it may be; close it and open another.
        """
        return finish(self._core.add(groups))

    def close(self) -> int:
        """Let nothing be added any more, so that iterations end; return how many samples the batch has.

        It may be repeated. Leaving `open_batch` without an exception does it, too.
        """
        return finish(self._core.close())
