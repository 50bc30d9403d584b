"""Problems in words: made again by their names, scored by what a response ends with."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from examples.tinymath import word_problems as problems
from examples.tinymath.curriculum import TINYMATH, curriculum_of
from examples.tinymath.options import MODEL, WORDS_OPTIONS, Options, usual_options
from examples.tinymath.tokenizer import EOS


@pytest.fixture(scope="module")
def drawn() -> list[problems.WordProblem]:
    return problems.draw(0, 100)


def test_the_same_seed_gives_the_same_problems_of_every_family(drawn: list[problems.WordProblem]) -> None:
    assert drawn[:20] == problems.draw(0, 100)[:20] != problems.draw(1, 20)
    assert {each.family for each in drawn} == set(problems.FAMILIES)
    assert [problems.load(each.id) for each in drawn[:20]] == drawn[:20]


def test_a_question_asks_for_the_working(drawn: list[problems.WordProblem]) -> None:
    for each in drawn:
        assert each.question.endswith(problems.HOW_TO_ANSWER)
        assert "only" not in each.question, "a family's own wish for the bare answer leaves no working"


def test_the_last_thing_that_looks_like_an_answer_is_scored(drawn: list[problems.WordProblem]) -> None:
    for each in drawn:
        # Some verifiers give a part of the score where the answer is a part of what is given.
        wrong = {"Yes": "no", "No": "yes"}.get(each.answer) or "".join(set("123456789") - set(each.answer))
        assert each.reward(f"First I guess {wrong}. So the answer is **{each.answer}**.{EOS}") == 1.0
        assert each.reward(f"The answer is {each.answer}, or {wrong}.{EOS}") < 0.1
        assert each.reward(f"The answer is {each.answer}.") == 0.0, "cut off before its end"
        assert each.reward(f"I cannot say.{EOS}") == 0.0
        assert each.reward(EOS) == 0.0


def test_an_answer_may_have_commas_and_any_case() -> None:
    number = problems.WordProblem("gsm_symbolic.0", "gsm_symbolic", "?", "28080")
    assert number.reward(f"It is 28,080 in all.{EOS}") == 1.0
    word = problems.WordProblem("syllogism.0", "syllogism", "?", "No")
    assert word.reward(f"Yes? Then again: no.{EOS}") == 1.0


def test_a_vocabulary_decides_on_the_problems(tmp_path: Path) -> None:
    assert curriculum_of(MODEL) is TINYMATH
    assert usual_options(TINYMATH) == Options()
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(MODEL)
    known.add_tokens(["<think>"])
    known.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"<pad>"', '"<padding>"'))
    words = curriculum_of(tmp_path)
    assert words.name == "words"
    assert words.load("gcd.5") == problems.load("gcd.5")
    assert words.draw(3, 2) == problems.draw(3, 2)
    assert usual_options(words) == WORDS_OPTIONS
