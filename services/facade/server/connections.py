"""Bound the number of connections, and end connections that do nothing for too long. Pure except for the sockets.

Every accepted socket has a place, from before its TLS handshake until it is closed. If no place is left, a
connection without a running request yields to a new one; if there is none, the new one is refused at once. Each
state except `WORKING` has a deadline.

Time is counted in ticks of the event loop. If the loop was blocked for a minute and could not read from its
clients, that counts as one tick, because the clients are not at fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv6Address, ip_address, ip_network

TICK_SECONDS = 0.25
"""Seconds between two ticks."""
LEAST_BYTES_PER_SECOND = 64 * 1024
"""Rate of a body above which it may take longer than its deadline."""
_NEW_TICKS = 4
"""Ticks for which a new connection or header is not ended while another connection is idle."""
ENDED_AT_ONCE = 128
"""Most connections of each state that one tick ends, so that it does not block the event loop."""


class State(Enum):
    """State of a connection. The value is the label of its deadline."""

    ENDING = "ending"
    """Closing; its client has not read everything yet."""
    WAITING = "header"
    """New, or in the middle of a header, or of a body that is ignored."""
    RESTING = "idle"
    """Kept alive after a request."""
    RECEIVING = "body"
    """In the middle of a body."""
    SENDING = "reader"
    """Its client does not read the answer."""
    WORKING = "working"
    """A request is in work."""

    # Members are singletons. The hash of Enum is slow: it hashes their names, in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Most connections, and the seconds that each state may last."""

    total: int
    each_address: int
    header_seconds: float
    idle_seconds: float
    body_seconds: float
    reader_seconds: float

    def ticks(self) -> Mapping[State, int]:
        """Return the deadlines in ticks."""
        seconds = {
            State.ENDING: self.header_seconds,
            State.WAITING: self.header_seconds,
            State.RESTING: self.idle_seconds,
            State.RECEIVING: self.body_seconds,
            State.SENDING: self.reader_seconds,
        }
        return {state: math.ceil(each / TICK_SECONDS) for state, each in seconds.items()}


class HttpConnection:
    """Accepted socket and its state. `end` closes it in the way that fits the state."""

    __slots__ = ("address", "end", "held", "received", "since", "state")

    def __init__(self, address: str, end: Callable[[State], None]) -> None:
        self.address = address
        self.end = end
        self.held = True
        self.state = State.WAITING
        self.since = 0
        self.received = 0
        """Bytes received since the body began."""


class _Queues(dict[State, dict[HttpConnection, None]]):
    """Connections by state, in the order in which they entered it."""

    def __init__(self) -> None:
        super().__init__({state: {} for state in State})

    def first(self, state: State) -> HttpConnection | None:
        return next(iter(self[state]), None)


class Connections:
    """All connections of one listening port."""

    def __init__(self, limits: ConnectionLimits, ended: Callable[[str], None] = lambda _reason: None) -> None:
        """Call `ended` with the reason for each refused or ended connection."""
        self._limits = limits
        self._deadlines = limits.ticks()
        self._ended = ended
        self._now = 0
        self._total = 0
        self._held: Counter[str] = Counter()
        self._all = _Queues()
        self._of_address: dict[str, _Queues] = {}
        self.by_file: dict[int, HttpConnection] = {}
        """Connections by the number of their open file."""

    def __len__(self) -> int:
        return self._total

    def admit(self, host: str, end: Callable[[State], None]) -> HttpConnection | None:
        """Admit a new connection; None: it is refused."""
        address = address_of(host)
        crowded = self._held[address] >= self._limits.each_address
        if crowded or len(self) >= self._limits.total:
            queues = self._of_address.get(address) if crowded else self._all
            found = None if queues is None else self._dispensable(queues)
            if found is None:
                self._ended("refused")
                return None
            self._ended("crowded")
            self.release(found)
            found.end(State.ENDING)
        connection = HttpConnection(address, end)
        connection.since = self._now
        self._total += 1
        self._held[address] += 1
        self._put(connection)
        return connection

    def release(self, connection: HttpConnection) -> None:
        """Free the place of a connection that is closed."""
        if not connection.held:
            return
        connection.held = False
        self._take(connection)
        self._total -= 1
        self._held[connection.address] -= 1
        if not self._held[connection.address]:
            del self._held[connection.address], self._of_address[connection.address]

    def enter(self, connection: HttpConnection, state: State) -> None:
        """Set the state of a connection, which starts the deadline of the state."""
        if state is connection.state or not connection.held:
            return
        self._take(connection)
        connection.state, connection.since, connection.received = state, self._now, 0
        self._put(connection)

    def count(self, connection: HttpConnection, received: int) -> None:
        """Count received bytes; the bytes of a body extend its deadline."""
        if connection.state is State.RECEIVING:
            connection.received += received

    def tick(self) -> None:
        """End the connections whose deadline has passed."""
        self._now += 1
        for state, ticks in self._deadlines.items():
            late: list[HttpConnection] = []
            for connection in self._all[state]:
                over = self._now - connection.since - ticks
                if over <= 0 or len(late) == ENDED_AT_ONCE:
                    break
                if over * TICK_SECONDS * LEAST_BYTES_PER_SECOND > connection.received:
                    late.append(connection)
            for connection in late:
                self._ended(state.value)
                # An orderly ending has a deadline, too.
                self.enter(connection, State.ENDING)
                connection.end(state)

    def _dispensable(self, queues: _Queues) -> HttpConnection | None:
        waiting = queues.first(State.WAITING)
        if waiting is not None and self._now - waiting.since >= _NEW_TICKS:
            return waiting
        # A new connection will send a request; resting ones have been answered.
        for found in (queues.first(State.RESTING), queues.first(State.ENDING), waiting):
            if found is not None:
                return found
        # A client that is slow with a body or an answer keeps its place for as long as the deadline of a header.
        for state in (State.RECEIVING, State.SENDING):
            found = queues.first(state)
            if found is not None and self._now - found.since >= self._deadlines[State.WAITING]:
                return found
        return None

    def _put(self, connection: HttpConnection) -> None:
        self._all[connection.state][connection] = None
        own = self._of_address.get(connection.address)
        if own is None:
            own = self._of_address[connection.address] = _Queues()
        own[connection.state][connection] = None

    def _take(self, connection: HttpConnection) -> None:
        del self._all[connection.state][connection]
        del self._of_address[connection.address][connection.state][connection]


def address_of(host: str) -> str:
    """Return the address that a connection counts for: IPv4, or 64 bits of IPv6, the network of a host."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ip_network((address, 64), strict=False))
    return str(address)
