"""Synchronous faces of sessions, for one thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline import types as t
from paceline.blocking import Face, finish, iterate
from paceline.sessions import AsyncSession, AsyncSessions


class Session(Face[AsyncSession]):
    """One sample that calls tools. `generate` and `answer` take turns until it has ended."""

    @property
    def key(self) -> t.SampleKey:
        """Its prompt and slot."""
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
        """Return what the session says until it calls a tool or ends.

        ValueError: it waits for an answer, or has ended and its last turn was given.
        """
        return finish(self._core.generate())

    def answer(self, token_ids: Sequence[int] | t.TokenIds) -> None:
        """Give the session tokens of its environment, with which it goes on.

        They are given as the policy is to read them, with what the chat template puts around them.

        InvalidArgumentError: they do not fit; shorten them, or end the session. ValueError: the session does not
        wait for an answer.
        """
        finish(self._core.answer(token_ids))

    def end(self) -> None:
        """End the session at its call, as COMPLETED; `generate` returns its last turn, which may be empty."""
        finish(self._core.end())


class Sessions(Face[AsyncSessions]):
    """Sessions of one step, used one after the other or all in one loop over `turns`, in one thread."""

    def __init__(self, core: AsyncSessions) -> None:
        super().__init__(core)
        self._faces: dict[t.SampleKey, Session] = {}

    def begin(self, group: t.Group) -> list[Session]:
        """Begin a session for each sample of a group. Errors are those of `OpenBatch.add`."""
        begun = [Session(core) for core in finish(self._core.begin(group))]
        self._faces |= {session.key: session for session in begun}
        return begun

    def turns(self) -> Iterator[tuple[Session, t.Turn]]:
        """Iterate over turns as they come, each with its session, until every session that was begun has ended."""
        for session, turn in iterate(self._core.turns()):
            yield self._faces[session.key], turn

    def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of sessions, and what the update measured; return how many samples were known."""
        return finish(self._core.batch.report_rewards(rewards, kl=kl, clip_fraction=clip_fraction))
