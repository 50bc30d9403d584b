"""Retries of failed calls: after UNAVAILABLE, or when the service says when to come again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import PacelineError, ResourceExhaustedError, UnavailableError

WRONG_ADDRESS_SECONDS = 5.0
"""Seconds for which a client that has never reached a gateway tries what seems to be a wrong address."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits and delays of retries while a service is unreachable or full."""

    seconds: float = 600.0
    """Seconds for which a call that keeps failing is tried again; then its error is raised. 0 never retries."""
    initial: float = 0.1
    """Seconds before the second attempt."""
    multiplier: float = 2.0
    maximum: float = 5.0
    """Longest delay in seconds. The service's own RetryInfo may ask for more."""
    jitter: float = 0.2
    """Each delay is drawn from [1 - jitter, 1 + jitter] times its value."""


def may_be_retried(error: PacelineError) -> bool:
    """Return True if the same call may succeed later: nothing answered, or the service named a time."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_after is not None
    return isinstance(error, UnavailableError)


class Backoff:
    """Delays between the attempts of one call; progress (an event of a stream) resets them."""

    def __init__(
        self,
        policy: RetryPolicy,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._draw = draw
        self._clock = clock
        self._began = 0.0
        self._wrong_since: float | None = None
        self.failures = 0
        """Attempts that failed in a row."""

    def progress(self) -> None:
        """Reset the delays: the call received an event."""
        self.failures = 0

    def seconds_left(self) -> float:
        """Return the seconds until the error of a call that goes on failing is raised."""
        return max(0.0, self._began + self._policy.seconds - self._clock())

    def delay_after(self, error: PacelineError, wrong_address: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt; None: raise the error instead.

        `wrong_address`: the error is that of an address at which there will be no gateway.
        """
        now = self._clock()
        if not wrong_address:
            self._wrong_since = None
        elif self._wrong_since is None:
            self._wrong_since = now
        if self.failures == 0:
            self._began = now
        self.failures += 1
        policy = self._policy
        # Bounded before the power: there may be thousands of failures.
        growth = policy.multiplier ** min(self.failures - 1, 64)
        delay = min(policy.maximum, policy.initial * growth)
        delay *= 1.0 + policy.jitter * (2.0 * self._draw() - 1.0)
        delay = max(delay, error.retry_after or 0.0)
        if not may_be_retried(error) or now + delay > self._began + policy.seconds:
            return None
        if self._wrong_since is not None and now + delay > self._wrong_since + WRONG_ADDRESS_SECONDS:
            return None
        return delay
