"""When a peer that failed is called again. Pure: times come from the caller, in monotonic seconds."""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds that a peer is left alone after its first failure, doubling with each in a row up to the second."""


class Breaker:
    """A circuit breaker for one peer.

    Closed, it admits every call. A failure opens it for a pause; then one call is admitted as a trial at a
    time, and what becomes of it closes the breaker or opens it for a pause twice as long. A trial that is
    never reported on (its caller was cancelled) is followed by another after the same pause.
    """

    def __init__(self, first: float = FIRST_PAUSE, longest: float = LONGEST_PAUSE) -> None:
        self._first = first
        self._longest = longest
        self._pause = 0.0
        self._opened_at = 0.0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """Whether the last call that counts went well, or there was none."""
        return self._pause == 0.0

    def ready(self, now: float) -> bool:
        """Whether a call would be admitted."""
        return self.closed or now >= self._until

    def admit(self, now: float) -> bool:
        """Whether a call may be made now; its outcome is to be reported with `began=now`."""
        if self.closed:
            return True
        if now < self._until:
            return False
        self._until = now + self._pause
        return True

    def succeeded(self, began: float) -> None:
        """A call that was admitted at `began` went well."""
        if self._counts(began):
            self._pause = 0.0

    def failed(self, began: float, now: float) -> None:
        """A call that was admitted at `began` has failed."""
        if self._counts(began):
            self._pause = min(self._longest, self._pause * 2 or self._first)
            self._opened_at = now
            self._until = now + self._pause

    def _counts(self, began: float) -> bool:
        # What was under way when the breaker opened says nothing about the peer since; of many calls that
        # fail together only the first doubles the pause.
        return self.closed or began >= self._opened_at
