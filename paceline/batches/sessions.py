"""Sessions: samples that call tools, wait for the answers, and continue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Sequence

import numpy as np

from paceline import convert
from paceline import types as t
from paceline.batches.parts import PartEvent
from paceline.batches.rollout import AsyncOpenBatch
from paceline.columns import part_of
from paceline.convert.values import UINT32, integers
from paceline.errors import FailedPreconditionError, NotFoundError, session_differs

_NOT_CALLING = "SAMPLE_NOT_CALLING"
"""Reason of a refused answer: the gateway has lost the session and generates it again, up to the same call."""


class AsyncSession:
    """One sample that calls tools. `generate` and `answer` take turns until it has ended."""

    key: t.SampleKey
    """The prompt and slot."""
    sample: t.Sample | None
    """The whole sample, once it has ended."""

    def __init__(self, sessions: AsyncSessions, prompt_id: str, slot: int) -> None:
        self._sessions = sessions
        self.key, self.sample = t.SampleKey(prompt_id, slot), None
        self.waits = False
        """True if `generate` has returned a call, which waits for an answer."""
        self.pending: t.Turn | None = None
        """Turn that was not taken yet."""
        self._tokens: list[int] = []
        self._answers: dict[int, t.Continuation] = {}

    def __repr__(self) -> str:
        state = "ended" if self.sample else "waits for an answer" if self.waits else "generates"
        return f"<AsyncSession {self.key.prompt_id!r}, slot {self.key.slot}: {state}, {len(self._tokens)} tokens>"

    @property
    def token_ids(self) -> t.TokenIds:
        """[tokens], the response so far, answers included."""
        return np.array(self._tokens, np.int64)

    async def generate(self) -> t.Turn:
        """Return the tokens that the session generates until it calls a tool or ends.

        ValueError: it waits for an answer, or has ended and its last turn was given.
        """
        await self._sessions.wait_for(
            self, lambda: self.waits or self.sample is not None or self.pending is not None
        )
        if self.pending is None:
            raise ValueError(f"{self.key} {'waits for an answer' if self.waits else 'has ended'}")
        return self.take()

    async def answer(self, token_ids: Sequence[int] | t.TokenIds) -> None:
        """Give the session tokens of its environment, and let it continue.

        The tokens are exactly what the policy reads, so they include what the chat template puts around an answer.

        InvalidArgumentError: they do not fit; shorten them, or end the session. ValueError: the session does not
        wait for an answer.
        """
        await self._continue(t.Continuation(*self._place(), tuple(integers(token_ids, "token_ids", *UINT32))))

    async def end(self) -> None:
        """End the session at its call, as COMPLETED; `generate` returns its last turn, which may be empty."""
        await self._continue(t.Continuation(*self._place(), end=True))

    def take(self) -> t.Turn:
        """Return the pending turn."""
        turn, self.pending = self.pending, None
        assert turn is not None, "nothing is pending"
        self.waits = not turn.done
        return turn

    def called(self, call: t.SampleCall) -> t.Continuation | None:
        """Note a call; return the answer to it if it was answered before.

        DataLossError: the session was generated again, and its tokens differ from the ones given before.
        """
        have, given = len(self._tokens), call.token_ids.tolist()
        known = self._tokens[call.begin : call.position]
        if call.begin > have or known != given[: len(known)]:
            raise session_differs(self.key.prompt_id, self.key.slot, min(call.begin, have))
        if call.position <= have:
            return self._answers.get(call.position)
        fresh = have - call.begin
        self._tokens += given[fresh:]
        for span in call.environment_spans:
            # Answers that an earlier trainer has given.
            tokens = tuple(self._tokens[span.begin : span.end])
            self._answers[span.begin] = t.Continuation(self.key.prompt_id, self.key.slot, span.begin, tokens)
        self.pending = t.Turn(**part_of(call, fresh), begin=have, done=False)
        return None

    def ended(self, sample: t.Sample) -> None:
        """Note the end of the session."""
        have = min(len(self._tokens), len(sample.token_ids))
        if self.pending is not None:
            have = min(have, self.pending.begin)
        self.sample, self._tokens, self.waits = sample, sample.token_ids.tolist(), False
        self.pending = t.Turn(**part_of(sample, have), begin=have, done=True)

    def _place(self) -> tuple[str, int, int]:
        if not self.waits:
            raise ValueError(f"{self.key} does not wait for an answer")
        return self.key.prompt_id, self.key.slot, len(self._tokens)

    async def _continue(self, continuation: t.Continuation) -> None:
        # Noted before it is sent, because another task may read the next turn before this call returns.
        self._answers[continuation.position], self.waits = continuation, False
        self._tokens += continuation.token_ids
        try:
            await self._sessions.send(continuation)
        except BaseException:
            if self.sample is None and self.pending is None:
                del self._answers[continuation.position], self._tokens[continuation.position :]
                self.waits = True
            raise


class AsyncSessions:
    """Sessions of one step. Many are used at once, each in its own task, or all in one loop over `turns`.

    The blocking client's are used in one thread: one after the other, or all in one loop over `turns`.
    """

    def __init__(self, batch: AsyncOpenBatch) -> None:
        self.batch = batch
        """The batch whose samples the sessions are."""
        self._sessions: dict[t.SampleKey, AsyncSession] = {}
        self._unfinished = 0
        self._called: dict[AsyncSession, None] = {}
        """Sessions with a turn that was not taken yet, in order of arrival."""
        self._early: dict[t.SampleKey, t.SampleCall | t.Sample] = {}
        """Events of sessions that an earlier trainer has begun."""
        self._failed: dict[t.SampleKey, AsyncSession] = {}
        """Sessions whose call to begin them failed. They may have turns, where only its answer was lost."""
        self._ahead: deque[PartEvent] = deque()
        self._events: AsyncGenerator[PartEvent, None] | None = None
        self._reading = False
        self._wakes: dict[Hashable, asyncio.Event] = {}

    async def begin(self, group: t.Group) -> list[AsyncSession]:
        """Begin a session for each sample of a group. Raises as `OpenBatch.add` does."""
        (group,) = convert.whole_groups([group])
        keys = [t.SampleKey(group.prompt_id, slot) for slot in range(group.samples)]
        if any(key in self._sessions for key in keys):
            raise ValueError(f"sessions of prompt {group.prompt_id!r} were begun before")
        begun = [self._failed.get(key) or AsyncSession(self, key.prompt_id, key.slot) for key in keys]
        self._sessions |= {session.key: session for session in begun}
        self._unfinished += sum(session.sample is None for session in begun)
        try:
            await self.batch.add([group])
        except BaseException:
            for session in begun:
                self._failed[session.key] = self._sessions.pop(session.key)
            self._unfinished -= sum(session.sample is None for session in begun)
            raise
        for session in begun:
            self._failed.pop(session.key, None)
            if (early := self._early.pop(session.key, None)) is not None:
                await self._route(session, early)
        return begun

    async def turns(self) -> AsyncIterator[tuple[AsyncSession, t.Turn]]:
        """Iterate over turns as they arrive, each with its session, until every session begun has ended."""
        while self._unfinished or self._called:
            await self.wait_for(self, lambda: bool(self._called) or not self._unfinished)
            while self._called:
                session = next(iter(self._called))
                del self._called[session]
                if session.pending is not None:
                    yield session, session.take()

    async def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of sessions, and measurements of the update; return how many samples were known."""
        return await self.batch.report_rewards(rewards, kl=kl, clip_fraction=clip_fraction)

    async def leave(self) -> None:
        """End unfinished sessions, as ABORTED, and read the rest, so that the batch can be acknowledged."""
        await self.batch.cancel(keep_partial=True)
        while await self._read():
            pass

    async def send(self, continuation: t.Continuation) -> None:
        """Send an answer. If the gateway has lost the session, the answer is sent again at its repeated call."""
        try:
            await self.batch.continue_sample(continuation)
        except NotFoundError:
            return
        except FailedPreconditionError as error:
            if error.reason != _NOT_CALLING:
                raise

    async def wait_for(self, waiter: Hashable, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns True. One of the waiting tasks reads events for all of them."""
        try:
            while not ready():
                if self._reading:
                    wake = self._wakes[waiter] = asyncio.Event()
                    await wake.wait()
                    continue
                self._reading = True
                try:
                    while not ready():
                        if not await self._read():
                            raise ValueError("the batch of these sessions was ended")
                finally:
                    self._reading = False
        finally:
            self._wakes.pop(waiter, None)
            if not self._reading:
                # One other task continues to read.
                for wake in self._wakes.values():
                    wake.set()
                    break

    async def _read(self) -> bool:
        """Read one event; return False if there are no more."""
        if self._events is None:
            self._events = self.batch.events_with_calls(self._ahead)
        try:
            found = await anext(self._events, None)
        except BaseException:
            # The batch keeps its position, so that another task can continue.
            self._events = None
            raise
        if found is None:
            return False
        part, event = found
        if isinstance(event, t.SampleEvent):
            sample = part.give(event)
            self.batch.step_stats.add(sample)
            await self._dispatch(sample.key, sample)
        else:
            await self._dispatch(t.SampleKey(event.prompt_id, event.slot), event)
        return True

    async def _dispatch(self, key: t.SampleKey, event: t.SampleCall | t.Sample) -> None:
        session = self._sessions.get(key)
        if session is None:
            self._early[key] = event
        else:
            await self._route(session, event)

    async def _route(self, session: AsyncSession, event: t.SampleCall | t.Sample) -> None:
        if isinstance(event, t.Sample):
            if session.sample is None:
                self._unfinished -= 1
            session.ended(event)
        elif (answer := session.called(event)) is not None:
            # The gateway had lost the session.
            await self.send(answer)
            return
        if session.pending is not None:
            self._called[session] = None
            for waiter in (session, self):
                if waiter in self._wakes:
                    self._wakes[waiter].set()
