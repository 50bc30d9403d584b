"""Interface of transports: the calls, and single attempts at them.

`paceline.calls` retries and continues; a transport only sends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
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
    """Call with one answer. `slow` ones wait for instances, for example until these have read weights."""

    service: str
    method: str
    request: Message
    slow: bool = False
    streams_request: bool = False
    """Send the request as a stream of one message."""


@dataclass(frozen=True, slots=True)
class Stream(Generic[R_co]):
    """Call with many answers. Making it again continues it.

    `request()` returns the request that continues from here; `read` returns the events of an answer that were not
    read before, and counts each as read when it is taken; `complete()` returns False if a stream that ended without
    an error was cut short; `whole()` returns True if no event can be missing, however the stream ended. The service
    begins a stream that `begins_at_once` with an answer, whether or not there is an event.
    """

    service: str
    method: str
    request: Callable[[], Message]
    read: Callable[[Any], Iterable[R_co]]
    complete: Callable[[], bool] = lambda: True
    whole: Callable[[], bool] = lambda: False
    begins_at_once: bool = False
    resumable: bool = True
    """False: a failure after the first event is raised."""
    renew: Callable[[PacelineError], Awaitable[bool]] | None = None
    """Returns True if it has changed something, so that the stream can be opened again at once; or raises."""


class StreamAttempt(Protocol):
    """Answers of one attempt at a stream."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over the answers; raise grpc.RpcError when the stream fails."""

    async def end(self) -> None:
        """End the stream, if it has not ended."""


class Transport(Protocol):
    """Way to make calls. Methods that are awaited may raise grpc.RpcError."""

    async def send(self, unary: Unary) -> Any:
        """Make a unary call and return the answer."""

    def post(self, unary: Unary, ended: Ended) -> None:
        """Begin a unary call that nobody waits for; `ended` is told its status, perhaps in another thread."""

    def open(self, stream: Stream[Any], seconds: float | None) -> StreamAttempt:
        """Open a stream that ends with DEADLINE_EXCEEDED after `seconds`, if given."""

    async def sleep(self, seconds: float) -> bool:
        """Wait; return False if the transport was closed meanwhile."""

    async def run_work(self, work: Callable[[], R]) -> R:
        """Run work of this machine."""

    async def lacks_tls(self) -> bool:
        """Return True if calls go in plain text to a server that speaks TLS."""

    def dial(self, address: str, tls: Tls | None) -> grpc.Channel:
        """Return a blocking channel to another address; None: with the TLS of this transport."""

    async def close(self) -> None:
        """End every call in progress and the connection."""
