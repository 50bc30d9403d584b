"""The given drafter's rules, sample by sample and token by token: what the compiled one must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ANCHOR, REACH = 4, 64
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
            self._realign(list(response[-ANCHOR:]))
        return compared

    def _realign(self, anchor: list[int]) -> None:
        here = self.length + self.offset
        for distance in range(1, REACH):
            for end in (here + distance, here - distance):
                if ANCHOR <= end <= len(self.given) and list(self.given[end - ANCHOR : end]) == anchor:
                    self.offset, self.matched = end - self.length, ANCHOR
                    return

    def ahead(self, window: int) -> list[tuple[int, int]]:
        """The next tokens, and the bucket of each."""
        here = self.length + self.offset
        tokens = self.given[here : here + window] if here >= 0 else []
        return [(token, self.bucket(i)) for i, token in enumerate(tokens)]
