"""When a failed call is made again: only after UNAVAILABLE, with growing, jittered delays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import PacelineError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, and how often, an unreachable service is tried."""

    attempts: int = 12
    """Calls in a row that may fail before the error is raised; 1 never retries."""
    initial: float = 0.1
    """Seconds before the second attempt."""
    multiplier: float = 2.0
    maximum: float = 5.0
    """Longest delay in seconds. The service's own RetryInfo may ask for more."""
    jitter: float = 0.2
    """Each delay is drawn from [1 - jitter, 1 + jitter] times its value."""


class Backoff:
    """The delays of one call. Progress (an event of a stream) starts them over."""

    def __init__(self, policy: RetryPolicy, draw: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._draw = draw
        self._failures = 0

    def progress(self) -> None:
        """The call got something: later failures count from the first again."""
        self._failures = 0

    def delay_after(self, error: PacelineError) -> float | None:
        """Seconds to wait before the call is made again; None when the error is to be raised."""
        self._failures += 1
        if not isinstance(error, UnavailableError) or self._failures >= self._policy.attempts:
            return None
        policy = self._policy
        delay = min(policy.maximum, policy.initial * policy.multiplier ** (self._failures - 1))
        delay *= 1.0 + policy.jitter * (2.0 * self._draw() - 1.0)
        return max(delay, error.retry_after or 0.0)
