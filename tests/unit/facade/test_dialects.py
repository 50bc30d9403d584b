"""Bodies of the dialects to sample requests, and samples back to bodies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline import types as t
from services.contracts.errors import InvalidArgument
from services.facade.dialects import sglang, trl, vllm
from services.facade.dialects.answers import AnswerWriter, usage
from services.facade.dialects.body import (
    LEAST_LOGPROB,
    Limits,
    check_samples,
    check_unsupported,
    finite,
    prompt_id_of,
    run_seed,
)
from services.facade.dialects.chat import ChatBody
from services.facade.dialects.sglang import SglangWriter
from services.facade.dialects.tokens import TokensBody, TokensSampling, TokensWriter
from services.facade.dialects.vllm import CompletionBody, completion_prompts
from services.facade.sample_names import GivenNames, RequestedSamples, SampleNames
from services.facade.samples import SampleOutput
from services.facade.text import TemplateTraits
from tests.support.token_columns import buffer

RAW, PROCESSED = t.LogprobsMode.RAW, t.LogprobsMode.PROCESSED


def requests_of(prompts: list[list[int]], samples: int, seed: int = 5) -> list[t.SampleRequest]:
    asked = RequestedSamples(prompts, samples, t.SamplingParams(), seed)
    return SampleNames(alone=True).requests(asked, GivenNames("r"), step=0)


def output_of(tokens: list[int], **fields: Any) -> SampleOutput:
    request = t.SampleRequest("r", "p", [7, 8])
    return SampleOutput(request, buffer(tokens, [-float(token) for token in tokens]), **fields)


def test_samples_are_named_by_prompt_and_place() -> None:
    requests = requests_of([[1, 2], [3], [1, 2]], 2)
    assert [(request.prompt_id, request.slot) for request in requests] == [
        (prompt_id_of([1, 2]), 0),
        (prompt_id_of([1, 2]), 1),
        (prompt_id_of([3]), 0),
        (prompt_id_of([3]), 1),
        (prompt_id_of([1, 2]), 2),
        (prompt_id_of([1, 2]), 3),
    ]
    assert {(request.run_id, request.run_seed, request.step) for request in requests} == {("r", 5, 0)}
    assert requests == requests_of([[1, 2], [3], [1, 2]], 2)
    # Known: a change would change every sample that a seed names.
    assert prompt_id_of([1, 2]) == "f59df9f51bfcb52f7ae49756810ec78b"
    assert prompt_id_of([1, 2]) != prompt_id_of([2, 1])


def test_seeds_are_64_bit() -> None:
    assert run_seed(7) == 7
    assert run_seed(-1) == (1 << 64) - 1
    assert run_seed(None) is None
    for wrong in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(InvalidArgument, match="seed"):
            run_seed(wrong)


def test_more_samples_than_allowed_are_refused() -> None:
    check_samples([[1]] * 10, 10, 100, {})
    with pytest.raises(InvalidArgument, match="101"):
        check_samples([[1]], 101, 100, {})


def test_vllms_parameters_reach_the_sample() -> None:
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_tokens": 2,
        "stop_token_ids": [4, 5],
        "stop": ["x", "y"],
        "allowed_token_ids": [4, 6],
        "ignore_eos": True,
    }
    body = CompletionBody(prompt=[1], logprobs=3, prompt_logprobs=0, **given)
    lists = {name: tuple(given[name]) for name in ("stop_token_ids", "stop", "allowed_token_ids")}
    wanted = t.SamplingParams(
        **{**given, **lists}, top_logprobs=3, prompt_logprobs=0, max_tokens=9, logprobs_mode=RAW
    )
    assert vllm.sampling_of(body, 9, RAW) == wanted
    assert vllm.sampling_of(CompletionBody(prompt=[1]), 9, RAW) == t.SamplingParams(max_tokens=9)
    assert CompletionBody(prompt=[1]).max_tokens == 16
    assert ChatBody(messages=[{}]).max_tokens is None
    assert vllm.sampling_of(CompletionBody(prompt=[1], top_k=-1), 9, RAW).top_k == 0
    assert vllm.sampling_of(CompletionBody(prompt=[1], stop="x"), 9, RAW).stop == ("x",)
    chat = ChatBody(messages=[{}], logprobs=True, top_logprobs=4)
    assert vllm.sampling_of(chat, 9, RAW).top_logprobs == 4
    for wrong in (chat.model_copy(update={"logprobs": None}), chat.model_copy(update={"top_logprobs": 21})):
        with pytest.raises(InvalidArgument, match="top_logprobs"):
            vllm.sampling_of(wrong, 9, RAW)


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}, "response_format": {"type": "text"}},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
    ],
)
def test_a_schema_reaches_the_sample(given: dict[str, Any]) -> None:
    sampling = vllm.sampling_of(CompletionBody(prompt=[1], **given), 9, RAW)
    assert json.loads(sampling.json_schema) == SCHEMA
    assert sglang.sampling_of(sglang.SglangSampling(json_schema="{}")).json_schema == "{}"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "structured_outputs"),
        (
            {
                "structured_outputs": {"json": SCHEMA},
                "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            },
            "structured_outputs",
        ),
    ],
)
def test_other_formats_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        vllm.sampling_of(CompletionBody(prompt=[1], **given), 9, RAW)
    assert [violation.field for violation in refused.value.violations] == [field]


def test_sglangs_parameters_reach_the_sample() -> None:
    given = sglang.SglangSampling(
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=[4],
        stop=["x"],
        ignore_eos=True,
    )
    body = sglang.GenerateBody(return_logprob=True, top_logprobs_num=5, logprob_start_len=0)
    found = sglang.sampling_of(given, body)
    assert (found.stop, found.top_logprobs, found.prompt_logprobs) == (("x",), 5, 5)
    without = sglang.sampling_of(given, body.model_copy(update={"logprob_start_len": -1}))
    assert (without.top_logprobs, without.prompt_logprobs) == (5, None)
    unasked = sglang.sampling_of(given, body.model_copy(update={"return_logprob": False}))
    assert (unasked.top_logprobs, unasked.prompt_logprobs) == (0, None)
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.9, 0)
    assert (found.max_tokens, found.min_tokens, found.stop_token_ids) == (9, 2, (4,))
    assert (found.ignore_eos, found.logprobs_mode) == (True, PROCESSED)
    assert sglang.sampling_of(sglang.SglangSampling(temperature=0)).logprobs_mode is RAW
    assert sglang.sampling_of(sglang.SglangSampling()).max_tokens == 128


def test_trls_parameters_reach_the_sample() -> None:
    body = trl.TrlBody(prompts=[[1]], temperature=0.7, max_tokens=9, logprobs=2)
    found = trl.sampling_of(body, trl.TrlSampling(stop_token_ids=[4], stop="x", min_tokens=2))
    assert (found.stop, found.top_logprobs) == (("x",), 2)
    assert (found.temperature, found.top_k, found.max_tokens, found.logprobs_mode) == (0.7, 0, 9, PROCESSED)
    assert (found.stop_token_ids, found.min_tokens) == ((4,), 2)


def test_parameters_without_a_field_are_refused_unless_they_ask_for_nothing() -> None:
    check_unsupported(CompletionBody(prompt=[1], best_of=1, stop=None, suffix=None), vllm.NEUTRAL)
    body = CompletionBody(prompt=[1], best_of=2, typo=1, guided_decoding={"json": {}})
    with pytest.raises(InvalidArgument) as refused:
        check_unsupported(body, vllm.NEUTRAL)
    assert [violation.field for violation in refused.value.violations] == [
        "best_of",
        "typo",
        "guided_decoding",
    ]


def test_no_parameter_is_both_supported_and_not() -> None:
    pairs = [
        (CompletionBody, vllm.NEUTRAL),
        (sglang.GenerateBody, sglang.NEUTRAL),
        (sglang.SglangSampling, sglang.NEUTRAL_SAMPLING),
        (sglang.UpdateFromDiskBody, sglang.UPDATE_NEUTRAL),
        (trl.TrlBody, trl.NEUTRAL),
    ]
    for body, neutral in pairs:
        assert not set(body.model_fields) & set(neutral)


@pytest.mark.parametrize(
    ("prompt", "prompts"), [([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([[1]], [[1]])]
)
def test_prompts_are_one_or_several(prompt: Any, prompts: list[list[int]]) -> None:
    assert completion_prompts(CompletionBody(prompt=prompt), None) == prompts
    several = isinstance(prompt[0], list)
    assert sglang.prompts_of(sglang.GenerateBody(input_ids=prompt), None) == (prompts, several)


def test_log_probabilities_can_be_written_as_json() -> None:
    assert finite([-0.5, float("-inf"), float("nan"), -1e30]) == [-0.5] + [LEAST_LOGPROB] * 3


def test_reasons_and_stop_tokens() -> None:
    body = CompletionBody(prompt=[1], stop_token_ids=[5], return_token_ids=True, logprobs=0)
    writer = AnswerWriter(body, "completion", ("cmpl-1", 0, "m"), None)
    ends = [
        (output_of([4, 5], finish_reason=t.FinishReason.STOP), "stop", 5),
        (output_of([4, 1], finish_reason=t.FinishReason.STOP), "stop", None),
        (output_of([4, 5], finish_reason=t.FinishReason.LENGTH), "length", None),
        (output_of([4], finish_reason=t.FinishReason.ABORTED), "abort", None),
    ]
    choices = writer.whole([output for output, _, _ in ends])["choices"]
    assert [(c["finish_reason"], c["stop_reason"]) for c in choices] == [(why, last) for _, why, last in ends]
    found = [
        SglangWriter(sglang.GenerateBody(input_ids=[1]), "id", 3, None).whole([output])
        for output, _, _ in ends
    ]
    infos = [each["meta_info"] for each in found if isinstance(each, dict)]
    assert [info["finish_reason"]["type"] for info in infos] == ["stop", "stop", "length", "abort"]
    assert {info["weight_version"] for info in infos} == {"3"}
    assert infos[0]["finish_reason"]["matched"] == 5
    asked = TokensBody(token_ids=[1], sampling_params=TokensSampling(stop="w4", stop_token_ids=[5]))
    stopped = output_of([3, 4], finish_reason=t.FinishReason.STOP, stop_string="w4")
    choices = TokensWriter(asked, "id", (0, "m")).whole([ends[0][0], stopped])["choices"]
    assert [choice["stop_reason"] for choice in choices] == [5, "w4"]


def test_a_resumed_sample_has_the_prompt_that_was_sent_and_may_have_no_token_of_its_own() -> None:
    request = t.SampleRequest("r", "p", [7, 8], slot=2, step=3, prefix_token_ids=[4, 5])
    output = SampleOutput(request, finish_reason=t.FinishReason.STOP)
    found = SglangWriter(sglang.GenerateBody(input_ids=[1]), "id", 3, None).whole([output])
    assert isinstance(found, dict)
    info = found["meta_info"]
    assert (info["prompt_tokens"], info["completion_tokens"]) == (4, 0)
    assert info["finish_reason"] == {"type": "stop", "matched": 5}
    assert info["paceline"] == {"step": 3, "prompt_id": "p", "slot": 2}
    body = CompletionBody(prompt=[1], stop_token_ids=[5], return_token_ids=True)
    (choice,) = AnswerWriter(body, "completion", ("cmpl-1", 0, "m"), None).whole([output])["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [7, 8, 4, 5])
    assert (choice["finish_reason"], choice["paceline"]) == ("stop", info["paceline"])


@pytest.mark.parametrize("wrong", [{"continuous_usage_stats": True}, {"include_usge": True}])
def test_options_of_a_stream_are_checked_as_other_parameters_are(wrong: dict[str, bool]) -> None:
    options = vllm.StreamOptions(include_usage=True, **wrong)
    bodies = [
        CompletionBody(prompt=[1], stream=True, stream_options=options),
        TokensBody(token_ids=[1], sampling_params=TokensSampling(), stream=True, stream_options=options),
    ]
    for body in bodies:
        with pytest.raises(InvalidArgument) as refused:
            body.samples(None, Limits(("m",), vocab_size=256, max_model_len=32))
        assert [each.field for each in refused.value.violations] == [f"stream_options.{next(iter(wrong))}"]


class Words:
    """A tokenizer whose token n is the word `wn`."""

    def encode(self, text: str, special: bool) -> list[int]:
        raise AssertionError("not used")

    def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        return " ".join(f"w{token}" for token in token_ids)

    def token(self, token_id: int) -> str:
        return f"w{token_id}"

    def template(self) -> TemplateTraits:
        raise AssertionError("not used")

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        raise AssertionError("not used")


def test_the_text_is_without_the_stop_string_that_ended_it() -> None:
    # It is in there before, where min_tokens let it pass.
    output = output_of([4, 5, 4, 5], finish_reason=t.FinishReason.STOP, stop_string="w4 w5")
    for include, text in ((False, "w4 w5 "), (True, "w4 w5 w4 w5")):
        body = CompletionBody(prompt=[1], stop="w4 w5", include_stop_str_in_output=include)
        writer = AnswerWriter(body, "completion", ("cmpl-1", 0, "m"), Words())
        (choice,) = writer.whole([output])["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "w4 w5")
    for no_trim, text in ((False, "w4 w5 "), (True, "w4 w5 w4 w5")):
        sampling = sglang.SglangSampling(stop=["w4 w5"], no_stop_trim=no_trim)
        body = sglang.GenerateBody(input_ids=[1], sampling_params=sampling)
        found = SglangWriter(body, "id", 3, Words()).whole([output])
        assert isinstance(found, dict)
        assert found["text"] == text
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "w4 w5"}


def test_a_growing_text_of_sglang_has_no_part_of_a_stop_string() -> None:
    body = sglang.GenerateBody(input_ids=[1], sampling_params=sglang.SglangSampling(stop=["5"]))
    texts = []
    for tokens, ended in (([4], False), ([4, 5], False), ([4, 5], True)):
        fields = (
            {"finish_reason": t.FinishReason.STOP, "stop_string": "5"} if ended else {"finish_reason": None}
        )
        found = SglangWriter(body, "id", 3, Words()).whole([output_of(tokens, **fields)])
        assert isinstance(found, dict)
        texts.append(found["text"])
    assert texts == ["", "w4", "w4 w"]


def test_the_likeliest_tokens_are_told_in_every_dialect() -> None:
    output = output_of([4, 5])
    output.columns.top_token_ids.extend([6, 4, 7, 8])
    output.columns.top_logprobs.extend([-0.5, -4.0, -1.0, -math.inf])
    output.request = replace(output.request, sampling=t.SamplingParams(top_logprobs=2))
    head = ("cmpl-1", 0, "m")
    body = CompletionBody(prompt=[1], logprobs=2)
    (choice,) = AnswerWriter(body, "completion", head, Words()).whole([output])["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"w4": -4.0, "w6": -0.5},
        {"w5": -5.0, "w7": -1.0, "w8": LEAST_LOGPROB},
    ]
    chat = ChatBody(messages=[{}], logprobs=True, top_logprobs=2)
    (choice,) = AnswerWriter(chat, "chat", head, Words()).whole([output])["choices"]
    told = [
        [(each["token"], each["logprob"]) for each in token["top_logprobs"]] for token in _content(choice)
    ]
    assert told == [[("w6", -0.5), ("w4", -4.0)], [("w7", -1.0), ("w8", LEAST_LOGPROB)]]
    asked = sglang.GenerateBody(input_ids=[1], return_logprob=True, top_logprobs_num=2)
    found = SglangWriter(asked, "id", 3, Words()).whole([output])
    assert isinstance(found, dict)
    assert found["meta_info"]["output_top_logprobs"] == [
        [[-0.5, 6, None], [-4.0, 4, None]],
        [[-1.0, 7, None], [LEAST_LOGPROB, 8, None]],
    ]
    answer = trl.answer(trl.TrlBody(prompts=[[7, 8]], logprobs=2), None, [output])
    assert answer["logprob_token_ids"] == [[[6, 4], [7, 8, 5]]]
    assert answer["logprobs"] == [[[-0.5, -4.0], [-1.0, LEAST_LOGPROB, -5.0]]]


def test_the_prompt_is_told_in_both_dialects() -> None:
    told = t.PromptLogprobs(np.float32([-2.0]), np.array([[9, 8]]), np.float32([[-0.5, -2.0]]))
    output = output_of([4], finish_reason=t.FinishReason.LENGTH, prompt_logprobs=told)
    body = CompletionBody(prompt=[1], prompt_logprobs=2)
    (choice,) = AnswerWriter(body, "completion", ("cmpl-1", 0, "m"), Words()).whole([output])["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "8": {"logprob": -2.0, "rank": 2, "decoded_token": "w8"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "w9"},
        },
    ]
    for begin in (0, 1):
        asked = sglang.GenerateBody(
            input_ids=[7, 8], return_logprob=True, logprob_start_len=begin, top_logprobs_num=2
        )
        found = SglangWriter(asked, "id", 3, None).whole([output])
        assert isinstance(found, dict)
        entries, likeliest = [[None, 7, None], [-2.0, 8, None]], [None, [[-0.5, 9, None], [-2.0, 8, None]]]
        assert found["meta_info"]["input_token_logprobs"] == entries[begin:]
        assert found["meta_info"]["input_top_logprobs"] == likeliest[begin:]


def _content(choice: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = choice["logprobs"]["content"]
    return found


def test_events_of_vllm_have_what_is_new() -> None:
    body = CompletionBody(
        prompt=[1], return_token_ids=True, logprobs=0, stream_options=vllm.StreamOptions(include_usage=True)
    )
    writer = AnswerWriter(body, "completion", ("cmpl-1", 0, "m"), None)
    output = output_of([1, 2])
    (first,) = writer.events([(0, output)])
    assert writer.events([(0, output)]) == []
    output.token_ids.append(3)
    output.logprobs.append(-3.0)
    output.finish_reason = t.FinishReason.LENGTH
    (last,) = writer.events([(0, output)])
    assert writer.events([(0, output)]) == []
    choices = [first["choices"][0], last["choices"][0]]
    assert [choice["token_ids"] for choice in choices] == [[1, 2], [3]]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[-1.0, -2.0], [-3.0]]
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]
    assert choices[0]["prompt_token_ids"] == [7, 8]
    assert "prompt_token_ids" not in choices[1]
    (end,) = writer.last_events([output])
    assert end["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_each_prompt_is_counted_once_also_where_two_are_equal() -> None:
    outputs = [output_of([1]) for _ in range(6)]
    assert usage(outputs, 3) == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}


@pytest.mark.parametrize(
    ("given", "version"),
    [(None, 5), ("9", 9), (9, 9), ("4", 5), ("0", 5), ("default", 5), (-1, 5), (1 << 70, 5)],
)
def test_an_update_has_the_number_asked_for_or_the_next_one(given: str | int | None, version: int) -> None:
    assert sglang.requested_version(given, 4) == version
