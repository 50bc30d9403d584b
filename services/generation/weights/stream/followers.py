"""Positions of the instances that fetch from this one, which say what its own source must keep. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class StreamFollower:
    """An instance that fetches: what it has, and when it last said so."""

    position: int
    seen_at: float


class Followers:
    """Instances that fetch the same stream. Times are in seconds, monotonic."""

    def __init__(self, grace: float, now: float) -> None:
        """Without a word of theirs for `grace` seconds followers are not waited for."""
        self._grace = grace
        self._followers: set[StreamFollower] = set()
        self._seen_at = now
        self._confirmed = 0

    def join(self, position: int, now: float) -> StreamFollower:
        """Add one that begins at this position."""
        follower = StreamFollower(position, now)
        self._followers.add(follower)
        self._seen_at = now
        return follower

    def acknowledge(self, follower: StreamFollower, position: int, now: float) -> None:
        """Record what one has."""
        follower.position = max(follower.position, position)
        follower.seen_at = self._seen_at = now

    def leave(self, follower: StreamFollower) -> None:
        """Remove one whose call has ended."""
        self._followers.discard(follower)

    def confirmed(self, received: int, expected: bool, now: float) -> int:
        """Return the position before which nothing needs to be kept at the source.

        That is what the foremost follower has. Where followers are `expected` and there is none, the next one may
        still come; after the grace it is all that was `received`, since nobody would go on from there.
        """
        heard = [each.position for each in self._followers if now - each.seen_at <= self._grace]
        if heard:
            self._confirmed = max(self._confirmed, *heard)
        elif not expected or now - self._seen_at > self._grace:
            self._confirmed = received
        return min(self._confirmed, received)
