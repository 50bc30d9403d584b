"""The `given` drafter: a sequence handed in with the request, such as the pre-generated rollout of the slot.

The sequence is position-aligned: with shared noise, its token at a position is what the target samples there
too, most of the time. After a mismatch it is not thrown away: it is realigned where the latest tokens of the
sample occur in it near the current place, and else followed at the same offset, where the noise is still
coupled, with a lower prediction until tokens match again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.generation.drafting.drafter import DraftContext, Offer
from services.generation.engine.types import SampleState

# Tokens that must match for a realignment, and how far from the current place it is looked for. Fewer tokens
# find places that only look alike; further away the text is about something else.
_ANCHOR = 4
_REACH = 64
# Predicted acceptance by the number of matches since the last mismatch; the last entry holds from there on.
# A prior, for text that diverged once and is finding its way back.
_ACCEPTANCE = (0.35, 0.55, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96)


@dataclass(slots=True)
class _Alignment:
    """How a sample lies along its given sequence: response position p is compared with given[p + offset]."""

    given: Sequence[int]
    offset: int = 0
    # Response tokens compared so far, and how many of the latest matched in a row.
    seen: int = 0
    matched: int = len(_ACCEPTANCE) - 1


class GivenDrafter:
    """Follows each sample's given sequence."""

    name = "given"

    def __init__(self) -> None:
        self._alignments: dict[str, _Alignment] = {}

    def begin(self, context: DraftContext) -> None:
        """Take the given sequence of a sample, where it has one."""
        if context.given:
            self._alignments[context.sample_id] = _Alignment(context.given)

    def offer(self, samples: Sequence[SampleState], window: int) -> list[Offer | None]:
        """The next tokens of each sample's given sequence."""
        if not self._alignments:
            return [None] * len(samples)
        return [self._offer(self._alignments.get(sample.sample_id), sample, window) for sample in samples]

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Nothing: the next offer sees the tokens themselves."""

    def end(self, sample_id: str) -> None:
        """Forget the sequence."""
        self._alignments.pop(sample_id, None)

    def _offer(self, alignment: _Alignment | None, sample: SampleState, window: int) -> Offer | None:
        if alignment is None:
            return None
        follow(alignment, sample.response)
        begin = len(sample.response) + alignment.offset
        if begin < 0:
            return None
        tokens = alignment.given[begin : begin + window]
        if not tokens:
            return None
        return Offer(tokens, _predictions(alignment.matched, len(tokens)))


def follow(alignment: _Alignment, response: Sequence[int]) -> None:
    """Compare the tokens that are new since the last call, and realign when the latest one mismatched."""
    given, offset = alignment.given, alignment.offset
    matched = alignment.matched
    for position in range(alignment.seen, len(response)):
        place = position + offset
        if 0 <= place < len(given) and given[place] == response[position]:
            matched += 1
        else:
            matched = 0
    alignment.seen = len(response)
    alignment.matched = matched
    if matched == 0 and len(response) >= _ANCHOR:
        _realign(alignment, response)


def _realign(alignment: _Alignment, response: Sequence[int]) -> None:
    """Move to the place nearest the current one where the last tokens of the response occur."""
    given, here = alignment.given, len(response) + alignment.offset
    anchor = list(response[-_ANCHOR:])
    for distance in range(1, _REACH):
        for end in (here + distance, here - distance):
            if _ANCHOR <= end <= len(given) and list(given[end - _ANCHOR : end]) == anchor:
                alignment.offset = end - len(response)
                alignment.matched = _ANCHOR
                return


def _predictions(matched: int, count: int) -> list[float]:
    last = len(_ACCEPTANCE) - 1
    return [_ACCEPTANCE[min(matched + i, last)] for i in range(count)]
