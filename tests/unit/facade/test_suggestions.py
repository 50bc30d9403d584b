"""An unknown parameter is refused with the one that the caller probably means, and no other way out is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.facade.dialects import body, sglang, tokens, trl, vllm
from services.facade.dialects.body import SAME_MEANING, Body, Limits, meant_instead
from services.facade.dialects.chat import ChatBody
from services.facade.dialects.paceline import HintBody, RewardsBody
from services.facade.work.jobs import RefusedBody, prepared

LIMITS = Limits(("m",), vocab_size=256, max_model_len=32)
COMPLETION, GENERATE, TOKENS = vllm.CompletionBody, sglang.GenerateBody, tokens.TokensBody
BODIES: list[type[Body]] = [COMPLETION, ChatBody, TOKENS, GENERATE, trl.TrlBody, HintBody, RewardsBody]


@pytest.mark.parametrize(
    ("kind", "body", "field", "meant"),
    [
        (GENERATE, {"sampling_params": {"max_tokens": 9}}, "sampling_params.max_tokens", "max_new_tokens"),
        (GENERATE, {"sampling_params": {"seed": 9}}, "sampling_params.seed", "sampling_seed"),
        (GENERATE, {"sampling_params": {"logprobs": 1}}, "sampling_params.logprobs", "return_logprob"),
        (GENERATE, {"max_new_tokens": 9}, "max_new_tokens", "sampling_params.max_new_tokens"),
        (GENERATE, {"temperature": 0.5}, "temperature", "sampling_params.temperature"),
        (GENERATE, {"max_tokens": 9}, "max_tokens", "sampling_params.max_new_tokens"),
        (GENERATE, {"request_id": "r"}, "request_id", "rid"),
        (COMPLETION, {"max_new_tokens": 9}, "max_new_tokens", "max_tokens"),
        (COMPLETION, {"top_logprobs_num": 2}, "top_logprobs_num", "logprobs"),
        (COMPLETION, {"rid": "r"}, "rid", "request_id"),
        (COMPLETION, {"include_usage": True}, "include_usage", "stream_options.include_usage"),
        (COMPLETION, {"temperatur": 0.5}, "temperatur", "temperature"),
        (TOKENS, {"sampling_params": {"sampling_seed": 3}}, "sampling_params.sampling_seed", "seed"),
        (TOKENS, {"max_tokens": 9}, "max_tokens", "sampling_params.max_tokens"),
        (
            trl.TrlBody,
            {"generation_kwargs": {"max_new_tokens": 9}},
            "generation_kwargs.max_new_tokens",
            "max_tokens",
        ),
        (trl.TrlBody, {"num_generations": 9}, "num_generations", "n"),
    ],
)
def test_the_parameter_of_another_dialect_is_named(
    kind: type[Body], body: dict[str, Any], field: str, meant: str
) -> None:
    prompt = {GENERATE: "input_ids", TOKENS: "token_ids", trl.TrlBody: "prompts"}.get(kind, "prompt")
    whole = {prompt: [[1]] if kind is trl.TrlBody else [1], **body}
    if kind is TOKENS:
        whole.setdefault("sampling_params", {})
    refused = prepared(None, json.dumps(whole).encode(), kind, LIMITS)
    assert isinstance(refused, RefusedBody)
    (violation,) = refused.violations
    assert violation.field == field
    assert violation.description.startswith("is not known here; did you mean ")
    assert meant in violation.description
    assert "leave it out" not in violation.description


def test_what_is_like_nothing_here_is_to_be_left_out() -> None:
    refused = prepared(None, b'{"prompt": [1], "store": 1}', COMPLETION, LIMITS)
    assert refused.violations[0].description == "is not known here; leave it out"


@pytest.mark.parametrize(
    ("kind", "name", "meant"), [(GENERATE, "request_id", "rid"), (COMPLETION, "rid", "request_id")]
)
def test_a_name_of_several_groups_has_each_suggestion_once(kind: type[Body], name: str, meant: str) -> None:
    assert meant_instead(name, kind) == [meant]


def test_a_long_name_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(body, "get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    assert not meant_instead("t" * 64, COMPLETION)
    assert not meant_instead("t" * 65, COMPLETION)
    assert compared == ["t" * 64]


def paths(body: type[Body], path: str = "") -> set[str]:
    """Return the path of each field of a body and of the bodies in it."""
    found = set()
    for name, each in body.model_fields.items():
        kinds = [each.annotation, *getattr(each.annotation, "__args__", ())]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Body)]
        found |= {path + name}.union(*(paths(kind, f"{path}{name}.") for kind in inner))
    return found


@given(st.data())
def test_a_letter_left_out_is_found_and_every_suggestion_exists(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(BODIES))
    name = data.draw(st.sampled_from(sorted(name for name in body.model_fields if len(name) > 4)))
    place = data.draw(st.integers(0, len(name) - 1))
    wrong = name[:place] + name[place + 1 :]
    others = {each for group in SAME_MEANING for each in group}
    for given_name in (wrong, data.draw(st.sampled_from(sorted(others)))):
        found = meant_instead(given_name, body)
        assert set(found) <= paths(body)
        assert len(found) <= 2
    if wrong not in body.model_fields and wrong not in others:
        assert meant_instead(wrong, body)
