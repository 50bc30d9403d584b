"""Interface of transports: calls, and single attempts at them.

`paceline.calls` repeats calls and continues streams; a transport makes single attempts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from paceline.errors import PacelineError
from paceline.transport.channel import Tls

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Ended = Callable[[grpc.StatusCode], None]


@dataclass(frozen=True, slots=True)
class Unary:
    """Call with one answer. A `slow` call waits for instances, for example until they have read weights."""

    service: str
    method: str
    request: Message
    slow: bool = False
    streams_request: bool = False
    """Send the request as a stream of one message."""


@dataclass(frozen=True, slots=True)
class Stream(Generic[R_co]):
    """Call with many answers. Opening it again continues it."""

    service: str
    method: str
    request: Callable[[], Message]
    """Returns the request that continues the stream from its current position."""
    read: Callable[[Any], Iterable[R_co]]
    """Returns the events of an answer that were not read before; each counts as read when it is taken."""
    complete: Callable[[], bool] = lambda: True
    """Returns False if a stream that ended without an error was cut short."""
    whole: Callable[[], bool] = lambda: False
    """Returns True if no event can be missing, however the stream ended."""
    begins_at_once: bool = False
    """True: the service begins the stream with an answer, whether or not there is an event."""
    resumable: bool = True
    """False: a failure after the first event is raised."""
    renew: Callable[[PacelineError], Awaitable[bool]] | None = None
    """Called after a failure: returns True if the stream can be opened again at once, or raises."""


class Transport(Protocol):
    """Connection to a gateway. Methods that are awaited may raise grpc.RpcError."""

    async def send(self, unary: Unary) -> Any:
        """Make a unary call and return the answer."""

    def post(self, unary: Unary, ended: Ended) -> None:
        """Begin a unary call in the background; `ended` is called with its status, perhaps in another thread."""

    def open(self, stream: Stream[Any], seconds: float | None) -> AsyncGenerator[Any, None]:
        """Make one attempt at a stream: iterate over its answers; raise grpc.RpcError when it fails.

        It ends with DEADLINE_EXCEEDED after `seconds`, if given. Closing the iterator ends the call.
        """

    async def sleep(self, seconds: float) -> bool:
        """Wait; return False if the transport was closed meanwhile."""

    async def run_work(self, work: Callable[[], R]) -> R:
        """Run slow local work without blocking an event loop."""

    async def lacks_tls(self) -> bool:
        """Return True if calls are sent in plain text to a server that speaks TLS."""

    def dial(self, address: str, tls: Tls | None) -> grpc.Channel:
        """Return a blocking channel to another address; None: with the TLS of this transport."""

    async def close(self) -> None:
        """End every call in progress and the connection."""
