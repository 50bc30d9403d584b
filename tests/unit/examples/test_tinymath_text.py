"""Texts of problems and answers, by tinymath's own characters and by a model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from examples.tinymath import tokenizer
from examples.tinymath.options import MODEL
from examples.tinymath.tasks import PRACTICE, make_problems, trace
from examples.tinymath.text import ModelText, text_of


def test_tinymath_needs_no_library() -> None:
    assert text_of(MODEL) is tokenizer


def test_another_vocabulary_is_read_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    known = AutoTokenizer.from_pretrained(MODEL)
    known.add_tokens(["<think>"])
    known.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"<pad>"', '"<padding>"'))
    assert isinstance(text_of(tmp_path), ModelText)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        text_of(tmp_path)


def test_a_right_answer_has_its_reward_however_it_is_tokenized() -> None:
    text = ModelText(AutoTokenizer.from_pretrained(MODEL))
    for problem in make_problems(3, 8, PRACTICE):
        ids = text.prompt_ids(problem.question)
        assert ids == tokenizer.prompt_ids(problem.question)[-len(ids) :]
        answer = tokenizer.encode(trace(problem))
        assert text.decode(answer) == tokenizer.decode(answer)
        assert problem.reward(text.decode(answer)) == 1.0
        assert not text.decode(answer[:-1]).endswith(tokenizer.EOS)


def test_a_chat_template_makes_the_prompt() -> None:
    known = AutoTokenizer.from_pretrained(MODEL)
    known.chat_template = "{% for m in messages %}({{ m.content }}){% endfor %}="
    assert ModelText(known).prompt_ids("1+1?") == known.encode("(1+1?)=", add_special_tokens=False)
