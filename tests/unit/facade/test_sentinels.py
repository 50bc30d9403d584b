"""Values that ask for nothing are as left out wherever they are so in the server that a dialect imitates."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from paceline import types as t
from paceline.convert import sampling_to_proto
from services.contracts.errors import InvalidArgument
from services.contracts.sampling import resolve
from services.facade.dialects import sglang, tokens, trl, vllm
from services.facade.dialects.body import Body, check_unsupported
from services.facade.dialects.chat import ChatBody
from services.facade.dialects.paceline import HintBody, RewardBody, RewardsBody
from services.facade.dialects.vllm import CompletionBody

SENTINELS: list[Any] = [None, "", [], {}, False, 0, -1]
BASES: dict[str, dict[str, Any]] = {
    "completion": {"prompt": [1]},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
}
NO_EFFECT = {"user", "session_id", "cache_salt", "request_id", "parallel_tool_calls", "return_mm_kwargs"}
"""Parameters whose values are as good as left out here, whatever they are."""
OTHERWISE = {
    "add_special_tokens 0": "is false where a chat has it, and no parameter of ours there",
    "allowed_token_ids []": "vLLM's engine refuses it, after its request has taken it",
    "prompt_embeds ": "no embeddings beside a prompt",
    "repetition_detection {}": "its defaults are off",
    "tool_choice None": "there are no tools",
    "top_k -1": "off, as 0 is",
    "truncate_prompt_tokens False": "vLLM takes it for 0, which leaves nothing of a prompt",
}
"""Values that the comparison cannot judge, and why."""
SAMPLED = frozenset(t.SamplingParams.__dataclass_fields__) & {
    *CompletionBody.model_fields,
    *ChatBody.model_fields,
}


def off(value: Any) -> Any:
    """Return None for what is off, however it is said."""
    return None if value is False or (isinstance(value, str | list | dict | tuple) and not value) else value


def vllms(kind: str, given: dict[str, Any]) -> Any:
    """Return the request of vLLM and the sampling parameters that it makes of it; None if it refuses."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError

    request = CompletionRequest if kind == "completion" else ChatCompletionRequest
    try:
        body = request(**BASES[kind], **given)
        sampling = body.to_sampling_params(7, {})
    except (AttributeError, TypeError, ValueError, VLLMValidationError):
        return None
    return body, {name: off(getattr(sampling, name)) for name in sampling.__struct_fields__}


def as_left_out(kind: str, name: str, value: Any) -> bool | None:
    """Return whether a value is as left out in vLLM; None if it is refused or not known there."""
    found, (plain, wanted) = vllms(kind, {name: value}), vllms(kind, {})
    if found is None or name not in type(plain).model_fields:
        return None
    body, sampling = found
    same = sampling == wanted
    # `max_tokens` is an argument of its own.
    return same and (
        (name in sampling and name != "max_tokens") or off(getattr(body, name)) == off(getattr(plain, name))
    )


def asked(body: type[Body], given: dict[str, Any], neutral: Any) -> Any:
    """Return all that a body asks for; None if it is refused."""
    try:
        found = body(**given)
        check_unsupported(found, neutral)
        fields: dict[str, Any] = {name: off(getattr(found, name)) for name in body.model_fields}
        if isinstance(found, vllm.SamplingFields):
            sampling = vllm.sampling_of(found, getattr(found, "max_tokens", None), t.LogprobsMode.RAW)
            # A sampling parameter is what becomes of it.
            fields |= {name: None for name in SAMPLED}
            fields["sampling"] = resolve(sampling_to_proto(sampling))
    except (ValidationError, InvalidArgument):
        return None
    return fields


def ours(kind: str, given: dict[str, Any]) -> Any:
    body = CompletionBody if kind == "completion" else ChatBody
    return asked(body, {**BASES[kind], **given}, vllm.NEUTRAL)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_what_is_as_left_out_in_vllm_is_so_here(kind: str) -> None:
    body: type[BaseModel] = CompletionBody if kind == "completion" else ChatBody
    plain, wrong = ours(kind, {}), []
    names = {*type(vllms(kind, {})[0]).model_fields, *body.model_fields, *vllm.NEUTRAL} - {*BASES[kind]}
    for name in sorted(names):
        for value in SENTINELS:
            theirs, found = as_left_out(kind, name, value), ours(kind, {name: value})
            if f"{name} {value}" in OTHERWISE:
                continue
            if (theirs and found != plain) or (theirs is False and found == plain and name not in NO_EFFECT):
                wrong.append((name, value, theirs, "refused" if found is None else found == plain))
    assert not wrong
    assert len(names) > 60


def test_vllms_generate_request_has_the_same_sentinels() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    for name in sorted({*GenerateRequest.model_fields, *tokens.NEUTRAL} - {"token_ids", "sampling_params"}):
        given = {"token_ids": [1], "sampling_params": {}}
        if name in GenerateRequest.model_fields:
            given[name] = GenerateRequest.model_fields[name].get_default()
        assert asked(tokens.TokensBody, given, tokens.NEUTRAL) is not None, name
    plain = asked(tokens.TokensSampling, {}, tokens.NEUTRAL_SAMPLING)
    assert plain["sampling"].max_tokens is None
    for name, value in {
        "seed": -1,
        "top_k": -1,
        "stop": [],
        "n": None,
        "bad_words": [],
        "max_tokens": None,
    }.items():
        assert asked(tokens.TokensSampling, {name: value}, tokens.NEUTRAL_SAMPLING) == plain, name


def test_all_sampling_parameters_of_vllm_are_known() -> None:
    from vllm import SamplingParams

    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public <= {*tokens.TokensSampling.model_fields, *tokens.NEUTRAL_SAMPLING}


EVERYWHERE: list[tuple[type[Body], dict[str, Any], dict[str, Any]]] = [
    (CompletionBody, BASES["completion"], vllm.NEUTRAL),
    (ChatBody, BASES["chat"], vllm.NEUTRAL),
    (vllm.StreamOptions, {}, {}),
    (tokens.TokensBody, {"token_ids": [1], "sampling_params": {}}, tokens.NEUTRAL),
    (tokens.TokensSampling, {}, tokens.NEUTRAL_SAMPLING),
    (tokens.TokenizeBody, {"prompt": "a"}, {}),
    (tokens.DetokenizeBody, {"tokens": [1]}, {}),
    (vllm.UpdateBody, {"weight_dir": "/a"}, {}),
    (vllm.AbortRequestsBody, {"request_ids": ["a"]}, {}),
    (trl.TrlBody, {"prompts": ["a"]}, trl.NEUTRAL),
    (trl.TrlSampling, {}, {}),
    (sglang.GenerateBody, {"input_ids": [1]}, sglang.NEUTRAL),
    (sglang.SglangSampling, {}, sglang.NEUTRAL_SAMPLING),
    (sglang.AbortRequestBody, {}, {}),
    (sglang.PauseBody, {}, {}),
    (sglang.UpdateFromDiskBody, {"model_path": "/a"}, sglang.UPDATE_NEUTRAL),
    (HintBody, {"step": 1, "prompts": [[1]]}, {}),
    (RewardsBody, {"step": 1, "rewards": []}, {}),
    (RewardBody, {"prompt_id": "a", "slot": 0, "reward": 1.0}, {}),
]
NULL_ASKS = {(trl.TrlBody, "logprobs"), (sglang.SglangSampling, "max_new_tokens")}
"""Parameters for which null is a value: without log-probabilities, without a limit."""


@pytest.mark.parametrize(
    ("body", "base", "neutral"), EVERYWHERE, ids=lambda each: getattr(each, "__name__", "")
)
def test_null_and_unknown_parameters_that_ask_for_nothing(
    body: type[Body], base: dict[str, Any], neutral: dict[str, Any]
) -> None:
    plain = asked(body, base, neutral)
    assert plain is not None
    for name in {*body.model_fields, *neutral} - {*base}:
        found = asked(body, {**base, name: None}, neutral)
        assert (found == plain) != ((body, name) in NULL_ASKS), name
        for value in neutral.get(name, ()):
            assert asked(body, {**base, name: value}, neutral) == plain, name
    for value in (None, False, "", [], {}):
        assert asked(body, {**base, "store": value}, neutral) == plain
    for value in (0, 1, True, "a", [None], {"a": None}):
        assert asked(body, {**base, "store": value}, neutral) is None


def test_what_is_on_when_it_is_left_out_is_not_switched_off_unseen() -> None:
    for name in ("include_reasoning", "spaces_between_special_tokens", "detokenize"):
        assert ours("completion", {name: False}) is None
        assert ours("completion", {name: True}) == ours("completion", {})


def test_minus_one_is_a_seed_for_sglang_and_none_for_vllm() -> None:
    assert tokens.TokensSampling(seed=-1).seed is None
    assert trl.TrlSampling(seed=-1).seed is None
    assert HintBody(step=1, prompts=[[1]], seed=-1).seed is None
    assert [CompletionBody(prompt=[1], seed=seed).seed for seed in (-1, -2, 0)] == [None, -2, 0]
    # SGLang has no value for a seed that is left out but null.
    assert sglang.SglangSampling(sampling_seed=-1).sampling_seed == -1
