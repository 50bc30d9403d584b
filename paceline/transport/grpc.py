"""Transports on gRPC: on an event loop, and blocking.

A connection that seems lost is dialled anew, at the next address of the deployment; it lives until its last call
has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import grpc

from paceline.blocking import StopSignal, may_be_stopped, on_stop
from paceline.errors import client_closed
from paceline.transport import channel
from paceline.transport.channel import Address, parse_address, speaks_tls
from paceline.transport.interface import Ended, Stream, StreamAttempt, Unary
from paceline.transport.options import ConnectionOptions
from paceline.v1 import fleet_pb2_grpc, rollout_pb2_grpc, weight_pb2_grpc


def stubs_on(channel: Any) -> dict[str, Any]:
    """Return the stubs of a grpc.Channel or a grpc.aio.Channel."""
    return {
        "Rollout": rollout_pb2_grpc.RolloutServiceStub(channel),  # type: ignore[no-untyped-call]
        "Weight": weight_pb2_grpc.WeightServiceStub(channel),  # type: ignore[no-untyped-call]
        "Fleet": fleet_pb2_grpc.FleetServiceStub(channel),  # type: ignore[no-untyped-call]
    }


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


R = TypeVar("R")

_MOST_WORKERS = 64
FAREWELL_SECONDS = 1.0
"""Seconds that calls which nobody waits for get to end when a transport is closed."""


class GrpcTransport(ABC, Generic[C]):
    """Calls on channels of type C. One whose gateway is silent or does not lead is dialled anew."""

    def __init__(
        self, options: ConnectionOptions, open_channel: Callable[[str, channel.Tls | None, bool, bool], C]
    ) -> None:
        self._options = options = options.with_token()

        def dial(address: Address) -> C:
            use_proxy = options.use_proxy and not address.loopback
            return open_channel(address.target, options.tls, options.leaders_only, use_proxy)

        self._dialer = Dialer(options.parsed(), dial)

    async def send(self, unary: Unary) -> Any:
        """Make a unary call and return the answer."""
        connection = self._dialer.take()
        try:
            return await self._answer(connection, unary)
        except grpc.RpcError as error:
            self.failed(connection, error, silent=True)
            raise
        finally:
            await self.release(connection)

    def open(self, stream: Stream[Any], seconds: float | None) -> StreamAttempt:
        """Open a stream."""
        connection = self._dialer.take()
        return _Attempt(self, connection, self._options.open(connection.stubs, stream, seconds))

    async def lacks_tls(self) -> bool:
        """Return True if calls go in plain text to a server that speaks TLS."""
        if self._options.tls is not None:
            return False
        return await self.run_work(lambda: any(map(speaks_tls, self._options.parsed())))

    @abstractmethod
    async def run_work(self, work: Callable[[], R]) -> R:
        """Run work of this machine."""

    def dial(self, address: str, tls: channel.Tls | None) -> grpc.Channel:
        """Return a blocking channel to another address; None: with the TLS of this transport.

        ValueError: the gateway asks for a token, and what is sent to that address could be read on the way.
        """
        self._options.check_secret(parse_address(address), tls)
        return channel.open_channel(address, tls or self._options.tls)

    def failed(self, connection: DialedChannel[C], error: Any, silent: bool) -> None:
        """Dial anew if the gateway did not serve the call; `silent` if it has sent nothing."""
        lost = error.code() is grpc.StatusCode.UNAVAILABLE
        if lost or (silent and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
            self._dialer.give_up(connection)

    async def release(self, connection: DialedChannel[C]) -> None:
        """End a call, and close its connection if it was the last on one that was given up."""
        unused = self._dialer.give_back(connection)
        if unused is not None:
            await self._close_channel(unused)

    async def _close_all(self) -> None:
        for each in self._dialer.close():
            await self._close_channel(each)

    @abstractmethod
    async def _answer(self, connection: DialedChannel[C], unary: Unary) -> Any:
        """Make a unary call."""

    @abstractmethod
    def answers(self, call: Any) -> AsyncIterator[Any]:
        """Return the answers of a stream."""

    @abstractmethod
    async def _close_channel(self, unused: C) -> None:
        """Close a channel, ending its calls."""


class _Attempt(Generic[C]):
    """Attempt at a stream on one connection, which it gives back."""

    def __init__(self, transport: GrpcTransport[C], connection: DialedChannel[C], call: Any) -> None:
        self._transport = transport
        self._connection = connection
        self._call = call
        self._answers = transport.answers(call)
        self._silent = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            answer = await anext(self._answers)
        except grpc.RpcError as error:
            self._transport.failed(self._connection, error, self._silent)
            raise
        self._silent = False
        return answer

    async def end(self) -> None:
        self._call.cancel()
        await self._transport.release(self._connection)


class AioTransport(GrpcTransport[grpc.aio.Channel]):
    """Calls on grpc.aio, for one event loop."""

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(options, channel.open_aio_channel)
        self._closed = False
        self._posted: set[asyncio.Task[None]] = set()
        self._workers = ThreadPoolExecutor(_MOST_WORKERS, "paceline-work")

    def post(self, unary: Unary, ended: Ended) -> None:
        """Begin a unary call that nobody waits for."""
        task = asyncio.create_task(self._told(unary, ended))
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)

    async def sleep(self, seconds: float) -> bool:
        """Wait; return False if the transport is closed. A caller that waits longer than it likes is cancelled."""
        await asyncio.sleep(seconds)
        return not self._closed

    async def run_work(self, work: Callable[[], R]) -> R:
        """Run work in a thread, of which there are enough for what has to run at once."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._workers, context.run, work)

    async def close(self) -> None:
        """End every call in progress and the connection."""
        self._closed = True
        if self._posted:
            await asyncio.wait(self._posted, timeout=FAREWELL_SECONDS)
        self._workers.shutdown(wait=False)
        await self._close_all()

    async def _told(self, unary: Unary, ended: Ended) -> None:
        try:
            await self.send(unary)
            ended(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            ended(error.code())

    async def _answer(self, connection: DialedChannel[grpc.aio.Channel], unary: Unary) -> Any:
        return await self._options.begin(connection.stubs, unary)

    def answers(self, call: Any) -> AsyncIterator[Any]:
        """Return the answers of a stream."""
        return aiter(call)

    async def _close_channel(self, unused: grpc.aio.Channel) -> None:
        await unused.close()


class BlockingTransport(GrpcTransport[grpc.Channel]):
    """Calls on gRPC's blocking API. Its coroutines block the calling thread and never suspend. Thread-safe."""

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(options, channel.open_channel)
        self._closed = StopSignal()
        self._posted: set[Any] = set()

    def post(self, unary: Unary, ended: Ended) -> None:
        """Begin a unary call that nobody waits for, in a thread of gRPC."""
        # Its connection is not taken: that it may be closed meanwhile does no harm.
        try:
            call = self._options.begin(self._dialer.current.stubs, unary, "future")
        except ValueError:
            # Another thread has closed it just now.
            return
        self._posted.add(call)

        def done(call: Any) -> None:
            self._posted.discard(call)
            ended(call.code())

        call.add_done_callback(done)

    async def sleep(self, seconds: float) -> bool:
        """Wait; return False as soon as the transport is closed, or work that runs under a signal is stopped."""
        wake = threading.Event()
        with self._closed.on_stop(wake.set), on_stop(wake.set):
            return not wake.wait(seconds)

    async def run_work(self, work: Callable[[], R]) -> R:
        """Run work here and now."""
        return work()

    async def close(self) -> None:
        """End every call in progress and the connection."""
        self._closed.stop()
        deadline = time.monotonic() + FAREWELL_SECONDS
        for call in list(self._posted):
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(timeout=max(0.0, deadline - time.monotonic()))
        await self._close_all()

    async def _answer(self, connection: DialedChannel[grpc.Channel], unary: Unary) -> Any:
        if not may_be_stopped():
            return self._options.begin(connection.stubs, unary)
        call = self._options.begin(connection.stubs, unary, "future")
        try:
            with on_stop(call.cancel):
                return call.result()
        except grpc.FutureCancelledError:
            raise call from None
        except BaseException:
            call.cancel()
            raise

    def answers(self, call: Any) -> AsyncIterator[Any]:
        """Return the answers of a stream."""
        return _BlockingAnswers(call)

    async def _close_channel(self, unused: grpc.Channel) -> None:
        unused.close()


class _BlockingAnswers:
    """Blocking stream as an asynchronous iterator."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            with on_stop(self._call.cancel):
                return next(self._call)
        except StopIteration:
            raise StopAsyncIteration from None
