"""Problems in words from reasoning-gym, for models that answer in sentences.

A problem is named by `family.index`, from which it can be recreated on another machine. Its question is the
family's own, plus a line that asks for the working. The family's verifier scores the last text in the response
that looks like an answer, because small models seldom keep to a requested form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from examples.tinymath.tokenizer import EOS

NAME = "words"
_SIZE = 1000
"""Problems of a family: some families generate only a given number."""
HOW_TO_ANSWER = "Explain every step, check the result, and give the answer in the last line."
_ONLY = re.compile(r"\s*Give only [^.]*\.")
"""Request of some families for an answer alone, which would leave no working."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_YES_OR_NO = re.compile(r"\b(?:yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WordFamily:
    """Kind of problems: its share of all, its options in reasoning-gym, and the pattern of an answer."""

    share: float
    options: Mapping[str, int]
    answer: re.Pattern[str] = _NUMBER


FAMILIES: Mapping[str, WordFamily] = {
    "syllogism": WordFamily(0.3, {}, _YES_OR_NO),
    "chain_sum": WordFamily(0.2, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "letter_counting": WordFamily(0.15, {"min_words": 2, "max_words": 3}),
    "gcd": WordFamily(0.15, {"min_value": 2, "max_value": 20}),
    "coin_flip": WordFamily(0.1, {"min_trials": 2, "max_trials": 3}),
    "gsm_symbolic": WordFamily(0.1, {}),
}
"""Families in which a model of 135 million parameters sometimes succeeds, and one in which it hardly ever does."""


@dataclass(frozen=True, slots=True)
class WordProblem:
    """Question with the answer that its family's verifier expects."""

    id: str
    family: str
    question: str
    answer: str

    def reward(self, response_text: str) -> float:
        """Score a response in [0, 1]; a response that was cut off gets 0."""
        text, ended, _ = response_text.partition(EOS)
        found = FAMILIES[self.family].answer.findall(text.replace(",", ""))
        if not ended or not found:
            return 0.0
        given = found[-1].capitalize()
        score = _dataset(self.family).score_answer(given, {"answer": self.answer, "metadata": {}})
        return min(1.0, max(0.0, float(score)))


def load(problem_id: str) -> WordProblem:
    """Recreate the problem with this id."""
    family, index = problem_id.split(".")
    entry = _dataset(family)[int(index)]
    question = _ONLY.sub("", entry["question"]).strip()
    return WordProblem(problem_id, family, f"{question}\n{HOW_TO_ANSWER}", str(entry["answer"]))


def draw(seed: int, n: int) -> list[WordProblem]:
    """Return n problems; a seed gives the same problems in the same order on every machine."""
    rng, names = Random(seed), list(FAMILIES)
    families = rng.choices(names, [FAMILIES[name].share for name in names], k=n)
    return [load(f"{family}.{rng.randrange(_SIZE)}") for family in families]


@cache
def _dataset(family: str) -> Any:
    """Return the reasoning-gym data set of a family. The import takes seconds, so it is done here."""
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=0, size=_SIZE, **FAMILIES[family].options)
