"""Transports on gRPC: `AioTransport` on an event loop, and `BlockingTransport`.

When a connection seems lost, the next address of the deployment is dialled. The old connection is closed when its
last call has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from paceline.blocking import StopSignal, may_be_stopped, on_stop
from paceline.errors import CancelledError, PacelineError, client_closed
from paceline.transport import channel
from paceline.transport.channel import Address, parse_address, speaks_tls
from paceline.transport.interface import Ended, Stream, Unary
from paceline.transport.options import ConnectionOptions
from paceline.v1 import fleet_pb2_grpc, rollout_pb2_grpc, weight_pb2_grpc

A = TypeVar("A")
C = TypeVar("C")
R = TypeVar("R")

FAREWELL_SECONDS = 1.0
"""Seconds for which closing a transport waits for its background calls."""
_MOST_WORKERS = 64

log = logging.getLogger("paceline")


def stubs_on(channel: Any) -> dict[str, Any]:
    """Return the stubs of a grpc.Channel or a grpc.aio.Channel."""
    return {
        "Rollout": rollout_pb2_grpc.RolloutServiceStub(channel),  # type: ignore[no-untyped-call]
        "Weight": weight_pb2_grpc.WeightServiceStub(channel),  # type: ignore[no-untyped-call]
        "Fleet": fleet_pb2_grpc.FleetServiceStub(channel),  # type: ignore[no-untyped-call]
    }


@dataclass(slots=True, eq=False)
class DialedChannel(Generic[C]):
    """Channel with its stubs."""

    channel: C
    stubs: dict[str, Any]
    calls: int = 0
    """Calls that are being made on it."""
    given_up: bool = False


class Dialer(Generic[C]):
    """Dials the addresses of a deployment, one at a time and in turn. Thread-safe.

    A connection that was given up stays open until its last call has ended, so open connections are bounded by
    calls.
    """

    def __init__(
        self, addresses: Sequence[A], dial: Callable[[A], C], hang_up: Callable[[C], Awaitable[None]]
    ) -> None:
        """Dial the first address; `hang_up` closes a channel, ending its calls."""
        self._addresses = addresses
        self._dial = dial
        self._hang_up = hang_up
        self._lock = threading.Lock()
        self._next = 0
        self._closed = False
        self._open: set[DialedChannel[C]] = set()
        self._current = self._dialled()

    @property
    def current(self) -> DialedChannel[C]:
        """The connection for a new call."""
        return self._current

    @property
    def closed(self) -> bool:
        """True once nothing is dialled any more."""
        return self._closed

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[DialedChannel[C]]:
        """Lend the connection for a call. One that was given up is closed after its last call.

        FailedPreconditionError: the client is closed.
        """
        with self._lock:
            if self._closed:
                raise client_closed()
            lent = self._current
            lent.calls += 1
        try:
            yield lent
        finally:
            with self._lock:
                lent.calls -= 1
                unused = lent.given_up and not lent.calls and lent in self._open
                if unused:
                    self._open.remove(lent)
            if unused:
                await self._hang_up(lent.channel)

    def give_up(self, connection: DialedChannel[C]) -> None:
        """Dial the next address, unless this connection was replaced already, or nothing can be dialled now."""
        with self._lock:
            if connection is not self._current or self._closed:
                return
            try:
                self._current = self._dialled()
            except (OSError, ValueError) as error:
                # Such as a certificate that is just being replaced. This connection also tries to connect again.
                log.warning("the connection is kept, because no other can be made: %s", error)
            else:
                connection.given_up = True

    async def close(self) -> None:
        """Stop dialling, and close all connections."""
        with self._lock:
            self._closed = True
            channels = [connection.channel for connection in self._open]
            self._open.clear()
        for each in channels:
            await self._hang_up(each)

    def _dialled(self) -> DialedChannel[C]:
        channel = self._dial(self._addresses[self._next])
        self._next = (self._next + 1) % len(self._addresses)
        connection = DialedChannel(channel, stubs_on(channel))
        self._open.add(connection)
        return connection


class GrpcTransport(ABC, Generic[C]):
    """Calls on channels of type C. A channel whose gateway is silent or does not lead is replaced."""

    def __init__(
        self,
        options: ConnectionOptions,
        open_channel: Callable[[str, channel.Tls | None, bool, bool], C],
        answers: Callable[[Any], AsyncIterable[Any]],
    ) -> None:
        """Open the first channel; `answers` returns the answers of a stream on such a channel."""
        self._options = options = options.with_token()
        self._answers = answers

        def dial(address: Address) -> C:
            use_proxy = options.use_proxy and not address.loopback
            return open_channel(address.target, options.tls, options.leaders_only, use_proxy)

        self._dialer = Dialer(options.parsed(), dial, self._close_channel)

    async def send(self, unary: Unary) -> Any:
        """Make a unary call and return the answer."""
        async with self._dialer.connection() as connection:
            try:
                return await self._answer(connection, unary)
            except grpc.RpcError as error:
                self._failed(connection, error, silent=True)
                raise
            except asyncio.CancelledError:
                self._check_open()
                raise

    async def open(self, stream: Stream[Any], seconds: float | None) -> AsyncGenerator[Any, None]:
        """Open a stream and iterate over its answers."""
        async with self._dialer.connection() as connection:
            call, silent = None, True
            try:
                call = self._options.begin(connection.stubs, stream, seconds)
                async for answer in self._answers(call):
                    silent = False
                    yield answer
            except grpc.RpcError as error:
                self._failed(connection, error, silent)
                raise
            except asyncio.CancelledError:
                self._check_open()
                raise
            finally:
                if call is not None:
                    call.cancel()

    async def lacks_tls(self) -> bool:
        """Return True if calls are sent in plain text to a server that speaks TLS."""
        if self._options.tls is not None:
            return False
        return await self.run_work(lambda: any(map(speaks_tls, self._options.parsed())))

    @abstractmethod
    async def run_work(self, work: Callable[[], R]) -> R:
        """Run slow local work without blocking an event loop."""

    def dial(self, address: str, tls: channel.Tls | None) -> grpc.Channel:
        """Return a blocking channel to another address, with this transport's TLS unless `tls` is given.

        ValueError: the client has a token, and data sent to that address could be read on the way.
        """
        self._options.check_secret(parse_address(address), tls)
        return channel.open_channel(address, tls or self._options.tls)

    def _failed(self, connection: DialedChannel[C], error: Any, silent: bool) -> None:
        """Replace the connection if the gateway did not serve the call; `silent`: it has sent nothing."""
        lost = error.code() is grpc.StatusCode.UNAVAILABLE
        if lost or (silent and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
            self._dialer.give_up(connection)

    def _check_open(self) -> None:
        """Raise CancelledError if `close` has ended a call, which grpc.aio reports as if its task was cancelled."""
        task = asyncio.current_task()
        if self._dialer.closed and not (task and task.cancelling()):
            raise CancelledError(grpc.StatusCode.CANCELLED, "the client was closed during the call")

    @abstractmethod
    async def _answer(self, connection: DialedChannel[C], unary: Unary) -> Any:
        """Make a unary call."""

    # Without the transport, so that one that is not closed is freed with its last reference.
    @staticmethod
    @abstractmethod
    async def _close_channel(unused: C) -> None:
        """Close a channel, ending its calls."""


class AioTransport(GrpcTransport[grpc.aio.Channel]):
    """Calls on grpc.aio, for one event loop."""

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(options, channel.open_aio_channel, aiter)
        self._closed = False
        self._posted: set[asyncio.Task[None]] = set()
        self._workers = ThreadPoolExecutor(_MOST_WORKERS, "paceline-work")

    def post(self, unary: Unary, ended: Ended) -> None:
        """Begin a unary call in the background."""
        task = asyncio.create_task(self._report_status(unary, ended))
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)

    async def sleep(self, seconds: float) -> bool:
        """Wait; return False if the transport was closed. Cancel the task to stop waiting."""
        await asyncio.sleep(seconds)
        return not self._closed

    async def run_work(self, work: Callable[[], R]) -> R:
        """Run work in a thread; there are enough threads for all work that must run at once."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._workers, context.run, work)

    async def close(self) -> None:
        """End every call in progress and the connection."""
        self._closed = True
        if self._posted:
            await asyncio.wait(self._posted, timeout=FAREWELL_SECONDS)
        self._workers.shutdown(wait=False)
        await self._dialer.close()

    async def _report_status(self, unary: Unary, ended: Ended) -> None:
        try:
            await self.send(unary)
            ended(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            ended(error.code())
        except PacelineError as error:
            # The client was closed.
            ended(error.code)

    async def _answer(self, connection: DialedChannel[grpc.aio.Channel], unary: Unary) -> Any:
        return await self._options.begin(connection.stubs, unary)

    @staticmethod
    async def _close_channel(unused: grpc.aio.Channel) -> None:
        await unused.close()


class BlockingTransport(GrpcTransport[grpc.Channel]):
    """Calls on gRPC's blocking API. Its coroutines block the calling thread and never suspend. Thread-safe."""

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(options, channel.open_channel, _blocking_answers)
        self._closed = StopSignal()
        self._posted: set[Any] = set()

    def post(self, unary: Unary, ended: Ended) -> None:
        """Begin a unary call in the background, in a thread of gRPC."""
        # The connection is not taken: it does no harm if it is closed meanwhile.
        try:
            call = self._options.begin(self._dialer.current.stubs, unary, way="future")
        except ValueError:
            # Another thread has just closed it.
            return
        self._posted.add(call)

        def done(call: Any) -> None:
            self._posted.discard(call)
            ended(call.code())

        call.add_done_callback(done)

    async def sleep(self, seconds: float) -> bool:
        """Wait; return False as soon as the transport is closed, or a stop signal is given to this thread."""
        wake = threading.Event()
        with self._closed.on_stop(wake.set), on_stop(wake.set):
            return not wake.wait(seconds)

    async def run_work(self, work: Callable[[], R]) -> R:
        """Run work in the calling thread."""
        return work()

    async def close(self) -> None:
        """End every call in progress and the connection."""
        self._closed.stop()
        deadline = time.monotonic() + FAREWELL_SECONDS
        for call in list(self._posted):
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(timeout=max(0.0, deadline - time.monotonic()))
        await self._dialer.close()

    async def _answer(self, connection: DialedChannel[grpc.Channel], unary: Unary) -> Any:
        if not may_be_stopped():
            return self._options.begin(connection.stubs, unary)
        call = self._options.begin(connection.stubs, unary, way="future")
        try:
            with on_stop(call.cancel):
                return call.result()
        except grpc.FutureCancelledError:
            raise call from None
        except BaseException:
            call.cancel()
            raise

    @staticmethod
    async def _close_channel(unused: grpc.Channel) -> None:
        unused.close()


async def _blocking_answers(call: Any) -> AsyncGenerator[Any, None]:
    while True:
        try:
            with on_stop(call.cancel):
                answer = next(call)
        except StopIteration:
            return
        yield answer
