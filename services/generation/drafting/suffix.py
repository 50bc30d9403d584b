"""The `suffix` drafter: what followed the last time the sample, its prompt or its given sequence read like this.

For every sample an index from n-grams to the place after their latest occurrence. The n-gram that ends the
sample is looked up, the match is extended backwards as far as it goes, and what followed there is offered. The
longer the match, the likelier the continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.generation.drafting.drafter import DraftContext, Offer
from services.generation.engine.types import SampleState

# Shorter n-grams match by chance in any text; with longer ones short repetitions are never found.
_NGRAM = 4
# A match longer than this predicts no better.
_LONGEST = 24


@dataclass(slots=True)
class _Index:
    """Texts of one sample and where their n-grams ended last: n-gram -> (text, position after it).

    Text 0 is prompt and response so far; text 1 the given sequence, when there is one.
    """

    texts: list[list[int]]
    places: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    # Response tokens taken over into text 0, and length of text 0 that is indexed.
    taken: int = 0
    indexed: int = 0


class SuffixDrafter:
    """Repeats what followed the longest earlier occurrence of a sample's last tokens."""

    name = "suffix"

    def __init__(self) -> None:
        self._indexes: dict[str, _Index] = {}

    def begin(self, context: DraftContext) -> None:
        """Index the given sequence; the prompt follows with the first offer."""
        index = _Index([list(context.prompt)])
        if context.given:
            index.texts.append(list(context.given))
            for end in range(_NGRAM, len(context.given)):
                index.places[tuple(context.given[end - _NGRAM : end])] = (1, end)
        self._indexes[context.sample_id] = index

    def offer(self, samples: Sequence[SampleState], window: int) -> list[Offer | None]:
        """For each sample, what followed its last tokens before."""
        return [self._offer(self._indexes.get(sample.sample_id), sample, window) for sample in samples]

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Nothing: the index is of tokens, not of outcomes."""

    def end(self, sample_id: str) -> None:
        """Forget a sample's index."""
        self._indexes.pop(sample_id, None)

    def _offer(self, index: _Index | None, sample: SampleState, window: int) -> Offer | None:
        if index is None:
            return None
        text = index.texts[0]
        text.extend(sample.response[index.taken :])
        index.taken = len(sample.response)
        if len(text) < _NGRAM:
            return None
        _extend(index)
        place = index.places.get(tuple(text[-_NGRAM:]))
        if place is None:
            return None
        source, position = index.texts[place[0]], place[1]
        tokens = source[position : position + window]
        if not tokens:
            return None
        return Offer(tokens, [_acceptance(_match_length(text, source, position))] * len(tokens))


def _extend(index: _Index) -> None:
    """Index the n-grams that end in text 0 beyond what is indexed, but for the last: it would find itself."""
    text = index.texts[0]
    for end in range(max(index.indexed + 1, _NGRAM), len(text)):
        index.places[tuple(text[end - _NGRAM : end])] = (0, end)
    index.indexed = max(len(text) - 1, 0)


def _match_length(text: Sequence[int], source: Sequence[int], position: int) -> int:
    """How many tokens before `position` in the source equal the last tokens of the text; at most `_LONGEST`."""
    length = _NGRAM
    limit = min(_LONGEST, len(text), position)
    while length < limit and text[-1 - length] == source[position - 1 - length]:
        length += 1
    return length


def _acceptance(match: int) -> float:
    """Predicted acceptance of a token after a match of this length: a prior, from 0.4 at the shortest on."""
    return min(0.4 + 0.05 * (match - _NGRAM), 0.95)
