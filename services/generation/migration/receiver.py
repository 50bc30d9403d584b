"""What a receiver knows of the samples that come to it. Pure: times are arguments, in seconds of one clock.

    OPEN ── commit ─▶ COMMITTED ── claim ─▶ CLAIMED
      │                   ├────── claim deadline ─▶ EXPIRED
      └─ cancel, deadline ┴────── disown ─▶ CANCELLED

Only OPEN can become COMMITTED, and only COMMITTED CLAIMED, so that a sample is never with two owners: a late Commit
finds its migration cancelled, a late Claim finds it expired. What is over is remembered for a while, for those who
did not hear the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.migration.reason import Reason

REMEMBERED = 4096
"""Migrations that are over and still known."""


class State(Enum):
    """As `pb.MigrationState`."""

    OPEN = pb.MIGRATION_STATE_OPEN
    COMMITTED = pb.MIGRATION_STATE_COMMITTED
    CLAIMED = pb.MIGRATION_STATE_CLAIMED
    CANCELLED = pb.MIGRATION_STATE_CANCELLED
    EXPIRED = pb.MIGRATION_STATE_EXPIRED


@dataclass(slots=True)
class Incoming:
    """One migration. `deadline` is that of the present state: OPEN ends CANCELLED by it, COMMITTED ends EXPIRED."""

    migration_id: str
    sample_id: str
    deadline: float
    state: State = State.OPEN
    reason: Reason | None = None
    message: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self.state in (State.CLAIMED, State.CANCELLED, State.EXPIRED)


class Ledger:
    """The migrations to one instance, by id."""

    def __init__(self, most_open: int) -> None:
        """`most_open`: reservations at a time."""
        self._most_open = most_open
        self._live: dict[str, Incoming] = {}
        self._over: OrderedDict[str, Incoming] = OrderedDict()

    def __iter__(self) -> Iterator[Incoming]:
        """Those that are not over."""
        return iter(list(self._live.values()))

    def get(self, migration_id: str) -> Incoming | None:
        """A migration, if it is known."""
        return self._live.get(migration_id) or self._over.get(migration_id)

    @property
    def full(self) -> bool:
        """Whether there are as many reservations as there may be."""
        return sum(each.state is State.OPEN for each in self._live.values()) >= self._most_open

    def open(self, migration_id: str, sample_id: str, deadline: float) -> Incoming:
        """A reservation is asked for. ValueError when the id is known."""
        if self.get(migration_id) is not None:
            raise ValueError(f"migration {migration_id} is known")
        incoming = self._live[migration_id] = Incoming(migration_id, sample_id, deadline)
        return incoming

    def commit(self, migration_id: str, deadline: float) -> bool:
        """The sample is here, and has to be claimed by the deadline. False when it may not be taken any more."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not State.OPEN:
            return False
        incoming.state, incoming.deadline = State.COMMITTED, deadline
        return True

    def claim(self, migration_id: str) -> Incoming | None:
        """The gateway takes a sample over; None when there is nothing to be claimed."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not State.COMMITTED:
            return None
        self._end(incoming, State.CLAIMED)
        return incoming

    def cancel(
        self, migration_id: str, reason: Reason, message: str = "", *, disown: bool = False
    ) -> tuple[Incoming, bool]:
        """Nothing is to come of a migration any more. A committed one stays, unless its donor disowns it.

        Returns the migration, and whether this ended it. An unknown one is remembered as cancelled.
        """
        incoming = self.get(migration_id)
        if incoming is None:
            incoming = Incoming(migration_id, "", 0.0, State.CANCELLED, reason, message)
            self._remember(incoming)
            return incoming, False
        if incoming.over or (incoming.state is State.COMMITTED and not disown):
            return incoming, False
        incoming.reason, incoming.message = reason, message
        self._end(incoming, State.CANCELLED)
        return incoming, True

    def expire(self, now: float) -> list[tuple[Incoming, State]]:
        """End what is past its deadline: each with the state that it was in."""
        found = [each for each in self._live.values() if each.deadline <= now]
        ended = [(each, each.state) for each in found]
        for each in found:
            each.reason, each.message = Reason.DEADLINE, f"the deadline of {each.state.name} is over"
            self._end(each, State.CANCELLED if each.state is State.OPEN else State.EXPIRED)
        return ended

    def _end(self, incoming: Incoming, state: State) -> None:
        incoming.state = state
        self._live.pop(incoming.migration_id, None)
        self._remember(incoming)

    def _remember(self, incoming: Incoming) -> None:
        self._over[incoming.migration_id] = incoming
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
