"""Choices of a suffix lookup: the tokens that followed the longest contexts, in the order of how often.

The services' index says its first choice alone. This one, which is slow and plain, ranks all tokens that followed
the longest suffix that occurs in the texts, then those that followed shorter ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bench.branches.choices import CHOICES, Choices
from paceline import SampleKey

ORDERS = (16, 12, 8, 6, 4, 3, 2, 1)
"""Context lengths in tokens, the longest first."""
RankedTokens = tuple[list[int], float]
"""Tokens, the best first, and the certainty of the first one."""
_Context = tuple[int, ...]


class SuffixChoices:
    """Tokens that followed each context in the texts of a prompt."""

    def __init__(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        self._followed: dict[_Context, Counter[int]] = {}
        self._prompt = list(prompt)
        for text in texts:
            whole = [*prompt, *text]
            for at in range(len(prompt), len(whole)):
                self.learn(whole, at)

    def learn(self, text: Sequence[int], at: int) -> None:
        """Record the token at a place of a text, which its prompt is part of."""
        for order in ORDERS:
            if order <= at:
                self._followed.setdefault(tuple(text[at - order : at]), Counter())[text[at]] += 1

    def ranked(self, text: Sequence[int], at: int) -> RankedTokens:
        """Return the choices for the place, the best first, and the certainty of the first one."""
        found, certainty = list[int](), 0.0
        for order in ORDERS:
            followed = self._followed.get(tuple(text[at - order : at])) if order <= at else None
            if followed is None:
                continue
            if not found:
                (_, most), *_ = followed.most_common(1)
                certainty = (most - 0.5) / (followed.total() + 1.0) + order / 1000
            found += [token for token, _ in followed.most_common() if token not in found]
            if len(found) >= CHOICES:
                break
        return found[:CHOICES], certainty


def look_up(
    prompt: Sequence[int], earlier: Sequence[Sequence[int]], running: Mapping[SampleKey, Sequence[int]]
) -> dict[SampleKey, list[RankedTokens]]:
    """Return the ranked tokens for every place but the first of samples of a prompt that run in step.

    Earlier texts are known from the beginning, those that run as far as they are.
    """
    index = SuffixChoices(prompt, earlier)
    texts = {key: [*prompt, *response] for key, response in running.items()}
    found: dict[SampleKey, list[RankedTokens]] = {key: [] for key in running}
    for place in range(max(map(len, running.values()))):
        at = len(prompt) + place
        here = {key: text for key, text in texts.items() if at < len(text)}
        for key, text in here.items():
            if place:
                found[key].append(index.ranked(text, at))
        for text in here.values():
            index.learn(text, at)
    return found


def choices(looked_up: Sequence[RankedTokens], response: Sequence[int]) -> Choices:
    """Return which choices the tokens of a response were."""
    ranks = [
        tokens.index(truth) if truth in tokens else CHOICES
        for (tokens, _), truth in zip(looked_up, response[1:], strict=True)
    ]
    certainty = [sure for _, sure in looked_up]
    return Choices(np.array(ranks, np.int64).reshape(1, -1), np.array(certainty).reshape(1, -1))
