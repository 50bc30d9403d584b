"""The given drafter's rules, sample by sample and token by token: what the compiled one must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ANCHOR, REACH, LATEST = 4, 64, 8
BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
LAST = len(BUCKETS)


@dataclass
class Follower:
    """One sample along its sequence."""

    given: Sequence[int]
    offset: int = 0
    length: int = 0
    # None: since its beginning.
    matched: int | None = None

    def bucket(self, ahead: int = 0) -> int:
        """Of the next token but `ahead`, should those before it match."""
        if self.matched is None:
            return LAST
        return max(i for i, least in enumerate(BUCKETS) if least <= self.matched + ahead)

    def take(self, response: Sequence[int]) -> list[tuple[int, bool]]:
        """Compare the tokens that are new in the response, and find the way back after a mismatch.

        Returns (bucket, whether it matched) of each token that was compared.
        """
        compared: list[tuple[int, bool]] = []
        if len(response) == self.length:
            return compared
        for position in range(self.length, len(response)):
            place = position + self.offset
            if place < 0:
                continue
            if place >= len(self.given):
                self.matched = 0
                break
            same = self.given[place] == response[position]
            compared.append((self.bucket(), same))
            self.matched = None if same and self.matched is None else (self.matched or 0) + 1 if same else 0
        self.length = len(response)
        if self.matched == 0 and self.length >= ANCHOR:
            self._realign(list(response))
        return compared

    def _realign(self, response: list[int]) -> None:
        here = self.length + self.offset
        near = self._near(here, response[-ANCHOR:])
        most = self._agreeing(here, response) if here < len(self.given) else -1
        if self.offset and self.length < len(self.given) and self._agreeing(self.length, response) > most:
            self.offset, most = 0, self._agreeing(self.length, response)
        if near is not None and self._agreeing(near, response) >= most:
            self.offset, self.matched = near - self.length, ANCHOR

    def _near(self, here: int, anchor: list[int]) -> int | None:
        """Return the nearest other place that these tokens come before."""
        for distance in range(1, REACH):
            for end in (here + distance, here - distance):
                if ANCHOR <= end <= len(self.given) and list(self.given[end - ANCHOR : end]) == anchor:
                    return end
        return None

    def _agreeing(self, place: int, response: list[int]) -> int:
        """How many of the latest tokens come before a place, each at its distance."""
        latest = list(enumerate(reversed(response[-LATEST:]), 1))
        return sum(0 <= place - i < len(self.given) and self.given[place - i] == token for i, token in latest)

    def ahead(self, window: int) -> list[tuple[int, int]]:
        """Return the next tokens, and the bucket of each."""
        here = self.length + self.offset
        tokens = self.given[here : here + window] if here >= 0 else []
        return [(token, self.bucket(i)) for i, token in enumerate(tokens)]
