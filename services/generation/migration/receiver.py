"""State machine of the samples that migrate to an instance. Pure: times are arguments, in seconds of one clock.

    OPEN ── commit ─▶ COMMITTED ── claim ─▶ CLAIMED
      │                   ├────── claim deadline ─▶ EXPIRED
      └─ cancel, deadline ┴────── disown ─▶ CANCELLED

Only OPEN can become COMMITTED, and only COMMITTED can become CLAIMED, so a sample never has two owners: a late
Commit finds its migration cancelled, a late Claim finds it expired. Ended migrations are remembered for a while,
for callers that did not hear the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.kv_transfer.reason import Reason

REMEMBERED = 4096
"""Number of ended migrations that are remembered."""


class ReceiverState(Enum):
    """State of a migration, as in `pb.MigrationState`."""

    OPEN = pb.MIGRATION_STATE_OPEN
    COMMITTED = pb.MIGRATION_STATE_COMMITTED
    CLAIMED = pb.MIGRATION_STATE_CLAIMED
    CANCELLED = pb.MIGRATION_STATE_CANCELLED
    EXPIRED = pb.MIGRATION_STATE_EXPIRED


@dataclass(slots=True)
class Incoming:
    """Migration of one sample. At `deadline`, OPEN becomes CANCELLED and COMMITTED becomes EXPIRED."""

    migration_id: str
    sample_id: str
    deadline: float
    state: ReceiverState = ReceiverState.OPEN
    reason: Reason | None = None
    message: str = ""

    @property
    def over(self) -> bool:
        """True once the migration has ended."""
        return self.state in (ReceiverState.CLAIMED, ReceiverState.CANCELLED, ReceiverState.EXPIRED)


class ReceiverLedger:
    """Migrations to one instance, by id."""

    def __init__(self, most_open: int) -> None:
        """Allow `most_open` reservations at a time."""
        self._most_open = most_open
        self._live: dict[str, Incoming] = {}
        self._over: OrderedDict[str, Incoming] = OrderedDict()

    def __iter__(self) -> Iterator[Incoming]:
        """Iterate over the migrations that have not ended."""
        return iter(list(self._live.values()))

    def get(self, migration_id: str) -> Incoming | None:
        """Return a migration; None if it is unknown."""
        return self._live.get(migration_id) or self._over.get(migration_id)

    @property
    def full(self) -> bool:
        """True if no further reservation is allowed."""
        return sum(each.state is ReceiverState.OPEN for each in self._live.values()) >= self._most_open

    def open(self, migration_id: str, sample_id: str, deadline: float) -> Incoming:
        """Add a reservation. ValueError when the id is known."""
        if self.get(migration_id) is not None:
            raise ValueError(f"migration {migration_id} is known")
        incoming = self._live[migration_id] = Incoming(migration_id, sample_id, deadline)
        return incoming

    def commit(self, migration_id: str, deadline: float) -> bool:
        """Commit a sample, to be claimed by the deadline. Returns False when it may not be taken any more."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not ReceiverState.OPEN:
            return False
        incoming.state, incoming.deadline = ReceiverState.COMMITTED, deadline
        return True

    def claim(self, migration_id: str) -> Incoming | None:
        """Let the gateway take a sample over. Returns None when there is nothing to claim."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not ReceiverState.COMMITTED:
            return None
        self._end(incoming, ReceiverState.CLAIMED)
        return incoming

    def cancel(
        self, migration_id: str, reason: Reason, message: str = "", *, disown: bool = False
    ) -> tuple[Incoming, bool]:
        """End a migration. A committed one stays, unless its donor disowns it.

        Returns the migration, and whether this ended it. An unknown one is remembered as cancelled.
        """
        incoming = self.get(migration_id)
        if incoming is None:
            incoming = Incoming(migration_id, "", 0.0, ReceiverState.CANCELLED, reason, message)
            self._remember(incoming)
            return incoming, False
        if incoming.over or (incoming.state is ReceiverState.COMMITTED and not disown):
            return incoming, False
        incoming.reason, incoming.message = reason, message
        self._end(incoming, ReceiverState.CANCELLED)
        return incoming, True

    def expire(self, now: float) -> list[tuple[Incoming, ReceiverState]]:
        """End the migrations past their deadline; returns each with the state that it was in."""
        found = [each for each in self._live.values() if each.deadline <= now]
        ended = [(each, each.state) for each in found]
        for each in found:
            each.reason, each.message = Reason.DEADLINE, f"the deadline of {each.state.name} is over"
            self._end(
                each, ReceiverState.CANCELLED if each.state is ReceiverState.OPEN else ReceiverState.EXPIRED
            )
        return ended

    def _end(self, incoming: Incoming, state: ReceiverState) -> None:
        incoming.state = state
        self._live.pop(incoming.migration_id, None)
        self._remember(incoming)

    def _remember(self, incoming: Incoming) -> None:
        self._over[incoming.migration_id] = incoming
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
