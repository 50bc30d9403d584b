"""Sampling parameters of a model's folder, for requests that name none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from vllm.config import ModelConfig

from paceline.v1.rollout_pb2 import HintNextBatchRequest
from services.facade.app import app
from services.facade.config import FacadeConfig
from services.facade.dialects.body import Limits
from services.facade.dialects.chat import ChatBody
from services.facade.dialects.paceline import HintBody
from services.facade.dialects.tokens import TokensBody
from services.facade.dialects.vllm import GENERATION_CONFIG, CompletionBody, model_defaults
from services.platform.config import ConfigError, read_config
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.models import VOCAB_SIZE, tiny_model

FOUND = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}
NOT_APPLIED = {"do_sample": False, "eos_token_id": [1], "max_new_tokens": 7, "top_h": 3}


def write(folder: Path, content: Any) -> Path:
    (folder / GENERATION_CONFIG).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_they_are_those_that_vllm_finds(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, VOCAB_SIZE)
    folder = write(tiny_model(tmp_path, seed=0), FOUND | NOT_APPLIED)
    expected = ModelConfig(str(folder), generation_config="auto").get_diff_sampling_param()
    assert expected.pop("max_tokens") == 7
    assert model_defaults(folder) == expected == FOUND


@pytest.mark.parametrize("content", [{}, {"temperature": None}, NOT_APPLIED])
def test_a_folder_may_have_none(tmp_path: Path, content: Any) -> None:
    assert model_defaults(tmp_path) == {}
    assert model_defaults(write(tmp_path, content)) == {}


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", {"temperature": "hot"}, {"top_p": True}, {"top_k": 1.5}, {"min_p": [1]}]
)
def test_what_cannot_be_used_keeps_the_facade_from_starting(tmp_path: Path, content: Any) -> None:
    byte_tokenizer(tmp_path, VOCAB_SIZE)
    model = write(tmp_path, content)
    with pytest.raises(ConfigError, match=GENERATION_CONFIG):
        app(FacadeConfig(model=model, generation_config="auto"), CollectorRegistry())
    # Where it is not used it costs nobody anything.
    app(FacadeConfig(model=model), CollectorRegistry())


def test_they_need_the_model() -> None:
    with pytest.raises(ValidationError, match="auto needs model"):
        FacadeConfig(generation_config="auto")


@pytest.mark.parametrize(
    ("body", "applied"),
    [
        (CompletionBody(prompt=[1]), True),
        (ChatBody(messages=[{"role": "user", "content": "a"}]), True),
        # As in vLLM, whose server hands these parameters on as they are.
        (TokensBody.model_validate({"token_ids": [1], "sampling_params": {}}), False),
    ],
)
def test_they_are_for_what_a_request_leaves_out(body: Any, applied: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(ChatBody, "prompts", lambda *_: [[1]])
    limits = Limits(("m",), vocab_size=VOCAB_SIZE, max_model_len=32, defaults=FOUND)
    asked = body.model_copy(deep=True).samples(None, limits).sampling
    assert {name: getattr(asked, name) for name in FOUND} == (FOUND if applied else dict.fromkeys(FOUND))
    if applied:
        named = body.model_copy(deep=True, update={"temperature": 1.0, "top_k": -1, "min_p": 0.0})
        sampling = named.samples(None, limits).sampling
        assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.top_p) == (1.0, 0, 0.0, 0.95)
    plain = body.samples(None, Limits(("m",), vocab_size=VOCAB_SIZE, max_model_len=32)).sampling
    assert all(getattr(plain, name) is None for name in FOUND)


def test_hints_are_of_the_requests_to_come() -> None:
    limits = Limits(("m",), vocab_size=VOCAB_SIZE, max_model_len=32, defaults=FOUND)
    body = HintBody(step=1, prompts=[[1]], top_p=0.5)
    body.prepare(None, limits)
    sampling = HintNextBatchRequest.FromString(body.announced).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == pytest.approx((0.6, 0.5, 20))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], ()),
        (["--served-model-name=org/m"], ("org/m",)),
        (["--served-model-name=org/m, m"], ("org/m", "m")),
        (["--served-model-name", "org/m", "--served-model-name", "m"], ("org/m", "m")),
    ],
)
def test_a_model_may_have_several_names(flags: list[str], names: tuple[str, ...]) -> None:
    assert read_config(FacadeConfig, flags, {}).model_names == names
    with pytest.raises(ConfigError, match="served_model_name: a name is empty"):
        read_config(FacadeConfig, ["--served-model-name=org/m,,m"], {})
    assert FacadeConfig(served_model_name=["a", "b"]).model_names == ("a", "b")
