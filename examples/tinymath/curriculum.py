"""Tasks that a policy is trained on, with the tokens of its vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from examples.tinymath import tokenizer, word_problems
from examples.tinymath.tasks import PRACTICE, load_problem, make_problems
from examples.tinymath.text import TaskText, text_of


class Task(Protocol):
    """A question with its verifier."""

    @property
    def id(self) -> str:
        """Name that is enough to make the task again on another machine."""

    @property
    def question(self) -> str:
        """The prompt text."""

    def reward(self, response_text: str) -> float:
        """Score a response in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Tasks for a model."""

    name: str
    text: TaskText
    draw: Callable[[int, int], Sequence[Task]]
    """Returns `n` tasks for a seed: `draw(seed, n)`. The same arguments give the same tasks on every machine."""
    load: Callable[[str], Task]
    """Makes the task that an id names."""


TINYMATH = Curriculum("tinymath", tokenizer, partial(make_problems, families=PRACTICE), load_problem)


def curriculum_of(model: Path) -> Curriculum:
    """Return tinymath's problems for its vocabulary, and problems in words for every other model.

    OSError, ValueError if the tokenizer of the model folder cannot be read.
    """
    text = text_of(model)
    if text is tokenizer:
        return TINYMATH
    return Curriculum(word_problems.NAME, text, word_problems.draw, word_problems.load)
