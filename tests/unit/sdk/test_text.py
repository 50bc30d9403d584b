"""Text of a model: prompts from chat messages, and samples as text."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import FinishReason, Provenance, Sample, SampleStatus, Text

MODEL = Path(__file__).parents[3] / "examples/tinymath/model"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ bos_token }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}{{ after or '' }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer with a chat template."""
    copy = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return copy


@pytest.fixture(scope="module")
def text(folder: Path) -> Text:
    return Text.of(folder)


def sample(text: Text, response: str, **fields: Any) -> Sample:
    ids = text.tokenizer.encode(response, add_special_tokens=False)
    made = Sample(
        prompt_id="p0",
        slot=0,
        token_ids=np.array(ids, np.int64),
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason=FinishReason.STOP,
        status=SampleStatus.COMPLETED,
        version_spans=(),
        provenance=Provenance(),
        seed=0,
    )
    return replace(made, **fields)


def test_messages_are_written_by_the_template_and_read_back(text: Text) -> None:
    prompt = text.prompt([{"role": "user", "content": "1+2"}])
    assert text.decode(prompt) == "<bos>1+2="
    assert prompt[0] == text.tokenizer.bos_token_id
    assert prompt.count(text.tokenizer.bos_token_id) == 1
    assert all(type(token) is int for token in prompt)


def test_variables_reach_the_template(text: Text) -> None:
    prompt = text.prompt([{"role": "user", "content": "1"}], add_generation_prompt=False, after="+")
    assert text.decode(prompt) == "<bos>1+"


def test_a_string_is_a_prompt_without_a_template(text: Text) -> None:
    assert text.prompt("1+2=") == text.tokenizer.encode("1+2=")
    assert text.decode(text.prompt("1+2="), skip_special=True) == "1+2="


def test_a_response_is_without_special_tokens_and_its_stop_string(text: Text) -> None:
    assert text.response(sample(text, "12<eos>")) == "12"
    assert text.response(sample(text, "12<eos>"), skip_special=False) == "12<eos>"
    assert text.response(sample(text, "1+1=2", stop_string="=2")) == "1+1"
    assert text.response(sample(text, "")) == ""


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ({"role": "user", "content": "1"}, "messages"),
        ("", "messages"),
        (["1"], "messages[0]"),
        ([{"content": "1"}], "messages[0].role"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0]"),
        ([{"role": "tool", "content": "1"}], "messages"),
    ],
)
def test_an_invalid_conversation_is_refused_by_field(text: Text, messages: Any, field: str) -> None:
    with pytest.raises(paceline.InvalidArgumentError) as refused:
        Text(_Bare(text.tokenizer)).prompt(messages) if messages == "" else text.prompt(messages)
    assert [each.field for each in refused.value.violations] == [field]


class _Bare:
    """Tokenizer that puts no special tokens around a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode: Callable[..., list[int]] = lambda said, **_: tokenizer.encode(
            said, add_special_tokens=False
        )


def test_a_failed_sample_has_no_text(text: Text) -> None:
    with pytest.raises(paceline.InvalidArgumentError, match=r"'p0', slot 0, has failed: NaN"):
        text.response(sample(text, "", status=SampleStatus.FAILED, error="NaN"))


def test_a_model_without_template_says_that_a_string_is_taken() -> None:
    with pytest.raises(paceline.InvalidArgumentError, match="no chat template; give the prompt as a string"):
        Text.of(MODEL).prompt([{"role": "user", "content": "1"}])


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(paceline.InvalidArgumentError) as refused:
        Text.of(tmp_path)
    assert [each.field for each in refused.value.violations] == ["model"]
    assert str(tmp_path) in str(refused.value)


def test_without_the_extra_it_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(paceline.FailedPreconditionError, match=r"pip install '\.\[text\]'") as refused:
        Text.of(folder)
    assert refused.value.reason == "EXTRA_MISSING"
