"""The batches of the synchronous client. Written by scripts/blocking-client from the asynchronous classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline import types as t
from paceline.batches.rollout import AsyncOpenBatch, AsyncRollout
from paceline.batches.sessions import AsyncSession, AsyncSessions
from paceline.blocking import Face, finish, iterate


class Rollout(Face[AsyncRollout]):
    """The samples of a submitted batch. Each is given once, over all iterations together.

    An iteration that was left in the middle is continued by the next one. When all samples were given, another
    iteration is a ValueError.
    """

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
        """Cursor behind the last sample that was given; of the first part, if the batch has several."""
        return self._core.cursor

    @property
    def complete(self) -> bool:
        """True if every sample was given."""
        return self._core.complete

    def stats(self) -> dict[str, float]:
        """Return figures of the samples given so far: the same as `run.stats`, for this batch alone."""
        return self._core.stats()

    def __len__(self) -> int:
        """Return the number of samples of the batch, so far if it is open."""
        return self._core.__len__()

    def __iter__(self) -> Iterator[t.Sample]:
        return iterate(self._core.__aiter__())

    def by_group(self) -> Iterator[list[t.Sample]]:
        """Iterate over whole groups, each when the last of its samples has ended; a group's samples are by slot.

        Samples of groups that are not whole when the iteration is left are given by the next `by_group`.
        """
        return iterate(self._core.by_group())

    def cancel(self, *, keep_partial: bool = False) -> int:
        """End unfinished samples and return how many there were; they are delivered as ABORTED.

        An open batch is closed by this.
        """
        return finish(self._core.cancel(keep_partial=keep_partial))

    def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of the batch, and measurements of its update; return how many samples were known."""
        return finish(self._core.report_rewards(rewards, kl=kl, clip_fraction=clip_fraction))

    def ack(self) -> int:
        """Acknowledge the samples given so far, which are not needed again; return how many were dropped.

        A batch that was read to its end is also acknowledged when a later step of the run is submitted, and when
        the run is left without an exception. Until then a restarted trainer can read the batch again.
        """
        return finish(self._core.ack())


class OpenBatch(Rollout):
    """The samples of an open batch. Each is given once, over all iterations together.

    Iterations end when the batch is closed and every sample was given.
    """

    _core: AsyncOpenBatch

    def add(self, groups: Iterable[t.Group]) -> int:
        """Add groups, and return how many samples they have; samples of groups added before do not count.

        A prompt id names one group of the batch: the same group again is skipped, so a call that failed may be
        repeated. After an error, groups that the gateway may have count as added. Waits while the gateway is full.

        FailedPreconditionError: nothing can be added. Reasons: BATCH_CLOSED, after `close` or `cancel`, after the
        deadline, or where the gateway has closed a batch that no client used; BATCH_STALE, where newer
        versions were published than `max_staleness` allows; VERSION_MISMATCH, for a batch without one.
        ResourceExhaustedError: the batch is as large as it may be; close it and open another.
        """
        return finish(self._core.add(groups))

    def close(self) -> int:
        """Close the batch, so that iterations end; return how many samples it has.

        May be repeated. Leaving `open_batch` without an exception also closes the batch.
        """
        return finish(self._core.close())


class Session(Face[AsyncSession]):
    """One sample that calls tools. `generate` and `answer` take turns until it has ended."""

    @property
    def key(self) -> t.SampleKey:
        """The prompt and slot."""
        return self._core.key

    @property
    def sample(self) -> t.Sample | None:
        """The whole sample, once it has ended."""
        return self._core.sample

    @property
    def token_ids(self) -> t.TokenIds:
        """[tokens], the response so far, answers included."""
        return self._core.token_ids

    def generate(self) -> t.Turn:
        """Return the tokens that the session generates until it calls a tool or ends.

        ValueError: it waits for an answer, or has ended and its last turn was given.
        """
        return finish(self._core.generate())

    def answer(self, token_ids: Sequence[int] | t.TokenIds) -> None:
        """Give the session tokens of its environment, and let it continue.

        The tokens are exactly what the policy reads, so they include what the chat template puts around an answer.

        InvalidArgumentError: they do not fit; shorten them, or end the session. ValueError: the session does not
        wait for an answer.
        """
        return finish(self._core.answer(token_ids))

    def end(self) -> None:
        """End the session at its call, as COMPLETED; `generate` returns its last turn, which may be empty."""
        return finish(self._core.end())


class Sessions(Face[AsyncSessions]):
    """Sessions of one step. Many are used at once, each in its own task, or all in one loop over `turns`.

    The blocking client's are used in one thread: one after the other, or all in one loop over `turns`.
    """

    def begin(self, group: t.Group) -> list[Session]:
        """Begin a session for each sample of a group. Raises as `OpenBatch.add` does."""
        return [self._part(Session, each) for each in finish(self._core.begin(group))]

    def turns(self) -> Iterator[tuple[Session, t.Turn]]:
        """Iterate over turns as they arrive, each with its session, until every session begun has ended."""
        for each in iterate(self._core.turns()):
            yield self._part(Session, each[0]), each[1]

    def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of sessions, and measurements of the update; return how many samples were known."""
        return finish(self._core.report_rewards(rewards, kl=kl, clip_fraction=clip_fraction))
