"""Tasks on which a policy is trained, with the tokenizer of its vocabulary."""

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
        """Name from which the task can be recreated on another machine."""

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
    """Function `draw(seed, n)`, which returns `n` tasks. Equal arguments give equal tasks on every machine."""
    load: Callable[[str], Task]
    """Function that recreates a task from its id."""


TINYMATH = Curriculum("tinymath", tokenizer, partial(make_problems, families=PRACTICE), load_problem)


def curriculum_of(model: Path) -> Curriculum:
    """Return tinymath's problems for its own vocabulary, and problems in words for every other model.

    OSError, ValueError: the tokenizer of the model folder cannot be read.
    """
    text = text_of(model)
    if text is tokenizer:
        return TINYMATH
    return Curriculum(word_problems.NAME, text, word_problems.draw, word_problems.load)
