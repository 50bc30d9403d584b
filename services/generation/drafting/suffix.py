"""The `suffix` drafter: what followed the last time a text read like this.

An index maps every n-gram to the place after its latest occurrence. There is one for each sample (its prompt, its
response, its given sequence) and one that all samples of the instance share, finished ones included: responses to
the same prompt, and to others of its kind, say much the same. The n-gram that ends a sample is looked up in both,
each match is extended backwards as far as it goes, and what followed the longer one is offered. The longer the
match, the likelier the continuation; how much likelier is learned from what verification kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.generation.drafting.drafter import DraftContext, Offer
from services.generation.engine.types import SampleState

# Shorter n-grams match by chance in any text; with longer ones short repetitions are never found.
_NGRAM = 4
# A match longer than this predicts no better.
_LONGEST = 24
# Tokens of finished samples that the shared index keeps; about 150 bytes each.
_CAPACITY = 200_000
# Weight of the prior acceptance of a match length, in observed tokens.
_PRIOR_TOKENS = 8

Ngram = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Text:
    """A token sequence and how far it is indexed; the last n-gram of a growing one is not: it would find itself."""

    tokens: list[int]
    indexed: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Behind the first `end` tokens of a text."""

    text: _Text
    end: int


@dataclass(slots=True)
class _Sample:
    """A sample's text, response tokens taken over into it, and places of its own n-grams."""

    text: _Text
    taken: int = 0
    places: dict[Ngram, _Place] = field(default_factory=dict)
    # Length of the match behind the latest offer.
    match: int = _NGRAM


class SuffixDrafter:
    """Repeats what followed the longest earlier occurrence of a sample's last tokens."""

    name = "suffix"

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._samples: dict[str, _Sample] = {}
        self._places: dict[Ngram, _Place] = {}
        self._finished: deque[_Text] = deque()
        self._kept = 0
        # Tokens tried and kept, by match length.
        self._tried = [0] * (_LONGEST + 1)
        self._accepted = [0] * (_LONGEST + 1)

    def begin(self, context: DraftContext) -> None:
        """Index the given sequence; the prompt follows with the first offer."""
        sample = _Sample(_Text(list(context.prompt)))
        given = _Text(list(context.given))
        for end in range(_NGRAM, len(given.tokens)):
            sample.places[tuple(given.tokens[end - _NGRAM : end])] = _Place(given, end)
        self._samples[context.sample_id] = sample

    def offer(self, samples: Sequence[SampleState], window: int) -> list[Offer | None]:
        """For each sample, what followed its last tokens before."""
        return [self._offer(self._samples.get(state.sample_id), state, window) for state in samples]

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Count how well a match of that length predicted: the first rejected token is the last one tried."""
        sample = self._samples.get(sample_id)
        if sample is not None:
            self._tried[sample.match] += accepted + (accepted < drafted)
            self._accepted[sample.match] += accepted

    def end(self, sample_id: str) -> None:
        """Keep a finished sample's text for the others, and forget the oldest beyond the capacity."""
        sample = self._samples.pop(sample_id, None)
        if sample is None:
            return
        self._finished.append(sample.text)
        self._kept += len(sample.text.tokens)
        while self._kept > self._capacity:
            self._evict(self._finished.popleft())

    def _evict(self, text: _Text) -> None:
        self._kept -= len(text.tokens)
        for end in range(_NGRAM, text.indexed + 1):
            ngram = tuple(text.tokens[end - _NGRAM : end])
            place = self._places.get(ngram)
            if place is not None and place.text is text:
                del self._places[ngram]

    def _offer(self, sample: _Sample | None, state: SampleState, window: int) -> Offer | None:
        if sample is None:
            return None
        tokens = sample.text.tokens
        tokens.extend(state.response[sample.taken :])
        sample.taken = len(state.response)
        if len(tokens) < _NGRAM:
            return None
        self._index(sample)
        last = tuple(tokens[-_NGRAM:])
        found = _longer(tokens, sample.places.get(last), self._places.get(last))
        if found is None:
            return None
        place, sample.match = found
        guess = place.text.tokens[place.end : place.end + window]
        if not guess:
            return None
        return Offer(guess, [self._acceptance(sample.match)] * len(guess))

    def _index(self, sample: _Sample) -> None:
        text = sample.text
        for end in range(max(text.indexed + 1, _NGRAM), len(text.tokens)):
            ngram, place = tuple(text.tokens[end - _NGRAM : end]), _Place(text, end)
            sample.places[ngram] = place
            self._places[ngram] = place
        text.indexed = max(len(text.tokens) - 1, 0)

    def _acceptance(self, match: int) -> float:
        """Predicted acceptance of a token after a match of this length; the prior rises from 0.4."""
        prior = min(0.4 + 0.05 * (match - _NGRAM), 0.95)
        return (prior * _PRIOR_TOKENS + self._accepted[match]) / (_PRIOR_TOKENS + self._tried[match])


def _longer(tokens: Sequence[int], own: _Place | None, shared: _Place | None) -> tuple[_Place, int] | None:
    """The place with the longer match and its length; a sample's own before an equal one of another."""
    best: tuple[_Place, int] | None = None
    for place in (own, shared):
        if place is not None and (best is None or place is not best[0]):
            match = _match_length(tokens, place.text.tokens, place.end)
            if best is None or match > best[1]:
                best = (place, match)
    return best


def _match_length(tokens: Sequence[int], source: Sequence[int], end: int) -> int:
    """How many tokens before `end` in the source equal the last of `tokens`; at most `_LONGEST`."""
    length = _NGRAM
    limit = min(_LONGEST, len(tokens), end)
    while length < limit and tokens[-1 - length] == source[end - 1 - length]:
        length += 1
    return length
