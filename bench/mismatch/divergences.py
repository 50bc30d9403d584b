"""Divergences of samples from the texts that they draft from, and the decode steps that each costs. Pure.

A divergence begins with a rejected draft token. The sample *joins* the texts again at the first token from which on
its next `ANCHOR` tokens occur in one of them. Tokens that no draft held were *drawn*: each cost a decode step.
Those between the divergence and the join could come only from other texts; those drawn after the join, beyond one
in `MOST` + 1, were in the texts already and are *lost*.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.mismatch.decoding import Verification

ANCHOR = 8
"""Tokens by which a join is recognised. A text's end counts too where it is the sample's."""
MOST = 16
"""Most draft tokens of a step."""
_WATCHED = 32
"""Tokens after a join in which lost ones are counted."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """One divergence: its draft's source, and tokens by kind (see above).

    `length` in tokens, the rejected one included; None if the sample never joins again.
    """

    source: str
    length: int | None
    drawn: int
    lost: int


def as_text(tokens: Sequence[int]) -> str:
    """Return tokens as characters, so that texts are searched by the standard library."""
    return "".join(map(chr, tokens))


def divergences(
    tokens: Sequence[int], steps: Sequence[Verification], texts: Sequence[str]
) -> Iterator[Divergence]:
    """Yield the divergences of a sample, in order; those before the end of what is counted of one belong to it.

    `texts`, of `as_text`, are what it could draft from, with "" between them implied.
    """
    # A character that is no token separates texts: no match crosses it.
    text, pool = as_text(tokens), "\U0010ffff".join(texts)
    drawn = [step.at + step.accepted for step in steps if step.at + step.accepted < len(tokens)]
    counted = 0
    for step in steps:
        at = step.at + step.accepted
        if step.accepted == step.drafted or at < counted or at >= len(tokens):
            continue
        joined = join(text, at + 1, pool)
        if joined is None:
            yield Divergence(step.source, None, _between(drawn, at + 1, len(text)), 0)
            return
        shared = _shared(text, joined, pool)
        counted = joined + shared
        lost = max(_between(drawn, joined, joined + shared) - shared // (MOST + 1), 0)
        yield Divergence(step.source, joined - at, _between(drawn, at + 1, joined), lost)


def join(text: str, start: int, pool: str) -> int | None:
    """Return the first place from `start` on at which the next tokens occur in `pool`; None if there is none."""
    for place in range(start, len(text) - ANCHOR + 1):
        if text[place : place + ANCHOR] in pool:
            return place
    return None


def _shared(text: str, start: int, pool: str) -> int:
    """Return for how many tokens, of those watched, the text goes on as `pool` does somewhere."""
    shared = ANCHOR
    while shared < _WATCHED and start + shared < len(text) and text[start : start + shared + 1] in pool:
        shared += 1
    return shared


def _between(places: Sequence[int], first: int, end: int) -> int:
    return bisect_left(places, end) - bisect_left(places, first)
