"""Make calls with retries, and continue streams where they were cut.

A call is repeated with growing delays after UNAVAILABLE, and after errors for which the service names a retry time.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from paceline import errors
from paceline.errors import (
    CLOSES,
    NEEDS_TLS,
    PacelineError,
    ResourceExhaustedError,
    UnavailableError,
    misdirection_of,
)
from paceline.transport.channel import Tls
from paceline.transport.interface import Stream, Transport, Unary

WRONG_ADDRESS_SECONDS = 5.0
"""Seconds for which a client that has never reached a gateway retries an address that seems wrong."""
STREAM_SECONDS = 120.0
"""Seconds after which a stream is opened again at its position, so that no lost event can make it hang."""
_LOCAL = (errors.DeadlineExceededError, errors.CancelledError)
"""Errors that are raised without a gateway."""

log = logging.getLogger("paceline")

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits and delays of retries while a service is unreachable or full."""

    seconds: float = 600.0
    """Seconds for which a failing call is repeated; then its error is raised. 0 never retries."""
    initial: float = 0.1
    """Seconds before the second attempt."""
    multiplier: float = 2.0
    """Factor from each delay to the next."""
    maximum: float = 5.0
    """Longest delay in seconds. The service's own RetryInfo may ask for more."""
    jitter: float = 0.2
    """Each delay is drawn from [1 - jitter, 1 + jitter] times its value."""


def may_be_retried(error: PacelineError) -> bool:
    """Return True if the same call may succeed later: no service answered, or it named a retry time."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_after is not None
    return isinstance(error, UnavailableError)


@dataclass(slots=True)
class Backoff:
    """Delays between the attempts at one call."""

    policy: RetryPolicy
    draw: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    """Consecutive attempts that failed. An event of a stream resets them, and so the delays."""
    _began: float = 0.0
    _wrong_since: float | None = None

    def seconds_left(self) -> float:
        """Return the seconds until the error is raised if the call continues to fail."""
        return max(0.0, self._began + self.policy.seconds - self.clock())

    def delay_after(self, error: PacelineError, wrong_address: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt; None: raise the error instead.

        `wrong_address`: the error shows that no gateway will ever answer at the address.
        """
        now = self.clock()
        if not wrong_address:
            self._wrong_since = None
        elif self._wrong_since is None:
            self._wrong_since = now
        if self.failures == 0:
            self._began = now
        self.failures += 1
        policy = self.policy
        # Bounded before the power: there may be thousands of failures.
        growth = policy.multiplier ** min(self.failures - 1, 64)
        delay = min(policy.maximum, policy.initial * growth)
        delay *= 1.0 + policy.jitter * (2.0 * self.draw() - 1.0)
        delay = max(delay, error.retry_after or 0.0)
        if not may_be_retried(error) or now + delay > self._began + policy.seconds:
            return None
        if self._wrong_since is not None and now + delay > self._wrong_since + WRONG_ADDRESS_SECONDS:
            return None
        return delay


class Caller:
    """Base of the calls of each service."""

    def __init__(
        self, transport: Transport, retry: RetryPolicy | None = None, stream_seconds: float = STREAM_SECONDS
    ) -> None:
        self._transport = transport
        self._retry = retry or RetryPolicy()
        self._stream_seconds = stream_seconds
        self._reached = False
        """True once a gateway has answered, so that its address is right."""

    async def close(self) -> None:
        """End every call in progress and the connection."""
        await self._transport.close()

    async def sleep(self, seconds: float) -> bool:
        """Wait; return False if the client was closed meanwhile."""
        return await self._transport.sleep(seconds)

    def dial(self, address: str, tls: Tls | None = None) -> grpc.Channel:
        """Return a blocking channel to an instance, with this client's TLS unless another is given."""
        return self._transport.dial(address, tls)

    async def call(self, unary: Unary, *, queues: bool = True) -> Any:
        """Make a call and return the answer; repeat it while the gateway is unreachable.

        With `queues` it is also repeated while the gateway is full.
        """
        backoff = Backoff(self._retry)
        while True:
            try:
                answer = await self._transport.send(unary)
                self._reached = True
                return answer
            except grpc.RpcError as error:
                failure = await self._failure(error)
            if not queues and isinstance(failure, errors.ResourceExhaustedError):
                raise failure
            await self._wait(backoff, failure, unary.method)

    async def events(self, stream: Stream[R], turn: float | None = None) -> AsyncGenerator[R, None]:
        """Iterate over the events of a stream; when it is cut, open it again at the same position.

        With `turn`, return after that many seconds, complete or not. If a gateway sends nothing at all on a stream
        that begins at once, the stream is opened again, as for an unreachable gateway.
        """
        backoff = Backoff(self._retry)
        seen = False
        seconds = (turn or self._stream_seconds) if stream.resumable else None
        while not stream.whole():
            began, silent = time.monotonic(), True
            try:
                async with aclosing(self._transport.open(stream, seconds)) as answers:
                    async for answer in answers:
                        backoff.failures = 0
                        silent, self._reached = False, True
                        for event in stream.read(answer):
                            seen = True
                            yield event
                if stream.complete():
                    return
                failure: errors.PacelineError = errors.cut_short()
            except grpc.RpcError as error:
                failure = await self._failure(error)
            if seen and not stream.resumable:
                raise failure
            if seconds is not None and _is_own_deadline(failure, began, seconds):
                if silent and stream.begins_at_once:
                    await self._wait(backoff, errors.stream_silent(stream.method, seconds), stream.method)
                    # A busy gateway may need longer than a turn.
                    seconds = self._stream_seconds
                elif turn is not None:
                    return
                else:
                    # The stream worked until its time limit.
                    backoff.failures = 0
            elif not stream.whole() and not (stream.renew and await stream.renew(failure)):
                await self._wait(backoff, failure, stream.method)

    async def run_work(self, work: Callable[[], R]) -> R:
        """Run slow local work, such as writing weights, without blocking an event loop."""
        return await self._transport.run_work(work)

    async def _failure(self, error: grpc.RpcError) -> errors.PacelineError:
        """Return the error of an attempt; it is UNAVAILABLE if the other side cancelled the call."""
        failure = errors.from_rpc(error)
        if isinstance(failure, errors.CancelledError) and await self._transport.sleep(0):
            return errors.call_dropped(failure)
        if not isinstance(failure, errors.UnavailableError) or failure.details:
            self._reached = self._reached or not isinstance(failure, _LOCAL)
        elif (cause := misdirection_of(failure.message)) is not None:
            if cause is CLOSES and not self._reached and await self._transport.lacks_tls():
                cause = NEEDS_TLS
            return errors.unreachable(failure, cause)
        return failure

    async def _wait(self, backoff: Backoff, error: errors.PacelineError, method: str) -> None:
        """Wait until the next attempt is due; raise the error if there is none."""
        wrong_address = error.reason == errors.WRONG_ADDRESS and not self._reached
        delay = backoff.delay_after(error, wrong_address)
        # Logged at the 4th, 8th, 16th failure and so on.
        if delay is not None and backoff.failures >= 4 and backoff.failures.bit_count() == 1:
            summary = f"{error.code.name}: {error.message}"
            log.warning(
                "the gateway does not answer %s (%s); trying again for up to %g s",
                *(method, summary, backoff.seconds_left()),
                stacklevel=2,
            )
        if delay is None or not await self._transport.sleep(delay):
            raise error


def _is_own_deadline(failure: errors.PacelineError, began: float, seconds: float) -> bool:
    """Return True if the attempt was ended by its own time limit."""
    late = time.monotonic() - began >= 0.9 * seconds
    return late and isinstance(failure, errors.DeadlineExceededError)
