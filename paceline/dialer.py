"""The connection that calls are made on, dialled anew when it seems lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.client_errors import client_closed
from paceline.stubs import stubs_on

A = TypeVar("A")
C = TypeVar("C")


@dataclass(slots=True, eq=False)
class DialedChannel(Generic[C]):
    """Channel with its stubs, and how many calls are being made on it."""

    channel: C
    stubs: dict[str, Any]
    calls: int = 0
    given_up: bool = False


class Dialer(Generic[C]):
    """Dials the addresses of a deployment, one at a time and in turn. Thread-safe.

    A connection that was given up lives until its last call has ended, so there are never more than calls.
    """

    def __init__(self, addresses: Sequence[A], dial: Callable[[A], C]) -> None:
        self._addresses = addresses
        self._dial = dial
        self._lock = threading.Lock()
        self._next = 0
        self._closed = False
        self._open: set[DialedChannel[C]] = set()
        self._current = self._dialled()

    @property
    def current(self) -> DialedChannel[C]:
        """The connection that a call would be made on now."""
        return self._current

    def take(self) -> DialedChannel[C]:
        """Return the connection for a call, which is to be given back. FailedPreconditionError: it is closed."""
        with self._lock:
            if self._closed:
                raise client_closed()
            self._current.calls += 1
            return self._current

    def give_up(self, connection: DialedChannel[C]) -> None:
        """Dial anew, if that has not been done since this connection."""
        with self._lock:
            if connection is self._current and not self._closed:
                connection.given_up = True
                self._current = self._dialled()

    def give_back(self, connection: DialedChannel[C]) -> C | None:
        """End a call; return the channel that is of no more use and is to be closed, if there is one."""
        with self._lock:
            connection.calls -= 1
            if connection.calls or not connection.given_up or connection not in self._open:
                return None
            self._open.remove(connection)
            return connection.channel

    def close(self) -> list[C]:
        """Dial no more; return all channels, which are to be closed."""
        with self._lock:
            self._closed = True
            channels = [connection.channel for connection in self._open]
            self._open.clear()
            return channels

    def _dialled(self) -> DialedChannel[C]:
        channel = self._dial(self._addresses[self._next])
        self._next = (self._next + 1) % len(self._addresses)
        connection = DialedChannel(channel, stubs_on(channel))
        self._open.add(connection)
        return connection
