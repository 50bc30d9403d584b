"""Make the text of a replay, and references that leave it for some tokens. Pure.

Two properties of a text decide how many tokens drafters save, and both are given here. Parts that occur earlier in
the text are what n-gram and suffix drafters find. Where an earlier rollout of the same seed leaves the response,
and for how long, decides what a reference is worth. All other tokens are random: the time of a step does not depend
on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

_FIRST_TOKEN = 3
"""Lowest token of a text; lower ones are padding, begin and end in most vocabularies."""


@dataclass(frozen=True, slots=True)
class TextRepeats:
    """Parts of a text that are copied from earlier in it: their share of all tokens, and their mean length."""

    share: float = 0.3
    length: float = 24.0


@dataclass(frozen=True, slots=True)
class TextDrift:
    """Difference of a reference: it leaves the text after `every` tokens, for `away` tokens; both are means."""

    every: float = 33.0
    away: float = 4.0

    def __str__(self) -> str:
        return f"references that differ every {self.every:g} tokens"


def text_of(length: int, vocabulary: int, repeats: TextRepeats, seed: int) -> list[int]:
    """Return `length` tokens of a vocabulary. A longer text of the same seed begins with a shorter one."""
    random = Random(seed)
    begins = repeats.share / (repeats.length * (1 - repeats.share)) if repeats.share < 1 else 1.0
    text = [random.randrange(_FIRST_TOKEN, vocabulary)]
    while len(text) < length:
        if random.random() >= begins:
            text.append(random.randrange(_FIRST_TOKEN, vocabulary))
            continue
        place = random.randrange(len(text))
        for offset in range(_some(random, repeats.length)):
            text.append(text[place + offset])
    return text[:length]


def reference_of(text: Sequence[int], vocabulary: int, drift: TextDrift, seed: int) -> list[int]:
    """Return a text of the same length that differs in some runs of tokens, and is in step with it in between."""
    random, reference, known = Random(seed), list(text), vocabulary - _FIRST_TOKEN
    place = _some(random, drift.every)
    while place < len(reference):
        end = place + _some(random, drift.away)
        for i in range(place, min(end, len(reference))):
            reference[i] = _FIRST_TOKEN + (text[i] - _FIRST_TOKEN + random.randrange(1, known)) % known
        place = end + _some(random, drift.every)
    return reference


def _some(random: Random, mean: float) -> int:
    """Draw a number of tokens, at least 1, from the geometric distribution with this mean."""
    if mean <= 1:
        return 1
    return 1 + int(math.log(1 - random.random()) / math.log(1 - 1 / mean))
