"""Arithmetic problems from reasoning-gym with its own verifiers as rewards.

A problem is named by `family.level.index`, from which it can be recreated on another machine. The levels of a
family differ in the size of the operands, and larger ones are drawn less often: most problems are short, and a
few need a page of working.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from examples.tinymath import traces
from examples.tinymath.tokenizer import EOS

MARK = "#"
"""Mark before the final answer; the rest of a response is working."""
MAX_QUESTION = 40
"""Longest question, in characters including the line end."""
MAX_TRACE = 1000
"""Longest worked solution, in characters; problems that need more are left out."""
DIRECT_SHARE = 0.2
"""Share of supervised solutions that state the answer without working (see `trace`)."""


@dataclass(frozen=True, slots=True)
class Level:
    """One difficulty of a family: its share of that family and its reasoning-gym options."""

    share: float
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """Kind of problems: its share of all, its question and its solution from metadata, and its levels."""

    share: float
    question: Callable[[dict[str, Any]], str]
    solve: Callable[[dict[str, Any]], traces.Solution]
    levels: tuple[Level, ...]


def _terms(share: float, terms: tuple[int, int], digits: tuple[int, int]) -> Level:
    options = {"min_terms": terms[0], "max_terms": terms[1], "min_digits": digits[0], "max_digits": digits[1]}
    return Level(share, options)


def _expression(metadata: dict[str, Any]) -> str:
    return str(metadata["expression"]).replace(" ", "")


FAMILIES: dict[str, Family] = {
    "chain_sum": Family(
        0.3,
        _expression,
        lambda metadata: traces.chain_sum(_expression(metadata)),
        (
            _terms(0.3, (2, 2), (1, 2)),
            _terms(0.25, (2, 3), (2, 3)),
            _terms(0.3, (3, 5), (2, 3)),
            _terms(0.15, (6, 9), (2, 3)),
        ),
    ),
    "gcd": Family(
        0.25,
        lambda metadata: "gcd " + ",".join(map(str, metadata["numbers"])),
        lambda metadata: traces.gcd(*metadata["numbers"]),
        tuple(
            Level(share, {"max_value": top})
            for share, top in ((0.2, 20), (0.45, 100), (0.2, 300), (0.15, 999))
        ),
    ),
    "products": Family(
        0.2,
        _expression,
        lambda metadata: traces.products([int(factor) for factor in _expression(metadata).split("*")]),
        (
            _terms(0.15, (2, 2), (1, 1)),
            _terms(0.45, (2, 2), (2, 2)),
            _terms(0.25, (2, 2), (3, 3)),
            _terms(0.07, (3, 3), (2, 2)),
            _terms(0.08, (2, 2), (4, 6)),
        ),
    ),
    "spell_backward": Family(
        0.1,
        lambda metadata: "rev " + metadata["word"].lower(),
        lambda metadata: traces.spell_backward(metadata["word"].lower()),
        tuple(Level(share, {"max_word_len": longest}) for share, longest in ((0.3, 6), (0.7, 10))),
    ),
    "count_bits": Family(
        0.15,
        lambda metadata: f"bits {metadata['number']}",
        lambda metadata: traces.count_bits(metadata["number"]),
        tuple(
            Level(share, {"max_n": 2**bits - 1})
            for share, bits in ((0.2, 5), (0.35, 8), (0.25, 14), (0.2, 22))
        ),
    ),
}


PRACTICE = ("chain_sum", "gcd", "products", "count_bits")
"""Families for learning from rewards. `spell_backward` is not one: the model never solves it, and its verifier's
rewards for single letters are noise."""


@cache
def _dataset(family: str, level: int) -> Any:
    """Return the reasoning-gym data set of one level. The import takes seconds, so it is done here."""
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=0, size=1, **FAMILIES[family].levels[level].options)


@dataclass(frozen=True, slots=True)
class Problem:
    """Question with the answer that its family's verifier expects."""

    id: str
    """`family.level.index`."""
    family: str
    question: str
    """The prompt text, which ends with a line end."""
    answer: str

    def reward(self, response_text: str) -> float:
        """Score a response in [0, 1] with the family's own verifier on the text after the last mark."""
        text = response_text.partition(EOS)[0]
        if MARK not in text:
            return 0.0
        level = int(self.id.split(".")[1])
        score = _dataset(self.family, level).score_answer(text.rpartition(MARK)[2], {"answer": self.answer})
        return min(1.0, max(0.0, float(score)))


def load_problem(problem_id: str) -> Problem:
    """Recreate the problem with this id."""
    family, level, index = problem_id.split(".")
    entry = _dataset(family, int(level))[int(index)]
    question = FAMILIES[family].question(entry["metadata"]) + "\n"
    return Problem(problem_id, family, question, str(entry["answer"]).lower())


def trace(problem: Problem, rng: Random | None = None, direct_share: float = DIRECT_SHARE) -> str:
    """Return a correct solution text that ends with the answer and the end-of-sequence token.

    With probability `direct_share` the working is left out. The supervised model thus learns two habits, to guess
    and to work, between which reinforcement learning can choose. Without `rng` the working is always included.
    """
    family, level, index = problem.id.split(".")
    working, answer = FAMILIES[family].solve(_dataset(family, int(level))[int(index)]["metadata"])
    direct = rng is not None and rng.random() < direct_share
    return f"{'' if direct else working}{MARK}{answer}{EOS}"


def draw_problem(rng: Random, families: Sequence[str] = tuple(FAMILIES)) -> Problem:
    """Draw a problem of the given families, and draw again if its question or solution is too long."""
    while True:
        family = rng.choices(families, [FAMILIES[name].share for name in families])[0]
        levels = FAMILIES[family].levels
        level = rng.choices(range(len(levels)), [level.share for level in levels])[0]
        problem = load_problem(f"{family}.{level}.{rng.randrange(2**40)}")
        plain = re.fullmatch(r"[ -~]+\n", problem.question) is not None
        if plain and len(problem.question) <= MAX_QUESTION and len(trace(problem)) <= MAX_TRACE:
            return problem


def make_problems(seed: int, n: int, families: Sequence[str] = tuple(FAMILIES)) -> list[Problem]:
    """Return n problems of the given families.

    A seed gives the same problems in the same order on every machine.
    """
    rng = Random(seed)
    return [draw_problem(rng, families) for _ in range(n)]
