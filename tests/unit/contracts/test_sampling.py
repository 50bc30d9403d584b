"""Defaults and limits of sampling parameters, token ids and lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1 import sample_pb2
from services.contracts.sampling import (
    MAX_REPORTED,
    ModelLimits,
    Sampling,
    check_lengths,
    check_sampling,
    check_tokens,
    resolve,
)

LIMITS = ModelLimits(vocab_size=100, max_model_len=64, has_text=True, end_tokens=(1,))
UNIT = st.floats(0, 1, exclude_min=True)

good_samplings = st.builds(
    Sampling,
    temperature=st.just(0) | st.floats(1e-4, 1e4),
    top_p=UNIT,
    top_k=st.integers(0, 1000),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-4, 1e4),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    max_tokens=st.none() | st.integers(10, LIMITS.max_model_len),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.lists(st.integers(0, 49), max_size=4).map(tuple),
    stop=st.lists(st.text(min_size=1, max_size=64), max_size=16).map(tuple),
    # With a token that ends nothing.
    allowed_token_ids=st.just(()) | st.lists(st.integers(0, 99), max_size=99).map(lambda ids: (50, *ids)),
    top_logprobs=st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    ignore_eos=st.booleans(),
    processed_logprobs=st.booleans(),
)
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
NEGATIVE = st.floats(max_value=0, exclude_max=True)
TOO_SMALL, TOO_LARGE = st.floats(1e-45, 9.9e-5), st.floats(10_001, 1e38)
OUTSIDE_TWO = st.floats(min_value=2, exclude_min=True) | st.floats(max_value=-2, exclude_max=True)

bad_values: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("temperature", NOT_FINITE | NEGATIVE | TOO_SMALL | TOO_LARGE),
    ("top_p", NOT_FINITE | st.floats(max_value=0) | st.floats(min_value=1, exclude_min=True)),
    ("top_k", st.integers(max_value=-1) | st.integers(min_value=2**31)),
    ("min_p", NOT_FINITE | NEGATIVE | st.floats(min_value=1, exclude_min=True)),
    ("repetition_penalty", NOT_FINITE | st.floats(max_value=0) | TOO_SMALL | TOO_LARGE),
    ("presence_penalty", NOT_FINITE | OUTSIDE_TWO),
    ("frequency_penalty", NOT_FINITE | OUTSIDE_TWO),
    ("max_tokens", st.integers(max_value=0) | st.integers(min_value=LIMITS.max_model_len + 1)),
    ("min_tokens", st.integers(max_value=-1)),
    ("top_logprobs", st.integers(min_value=21)),
    ("prompt_logprobs", st.integers(min_value=21)),
]


@given(good_samplings)
def test_what_is_allowed_is_not_complained_of(sampling: Sampling) -> None:
    assert check_sampling(sampling, LIMITS, "sampling") == []


@pytest.mark.parametrize(("name", "values"), bad_values, ids=[name for name, _ in bad_values])
def test_each_bad_value_is_one_violation_that_shows_it(name: str, values: st.SearchStrategy[Any]) -> None:
    @given(good_samplings, values)
    def check(good: Sampling, value: Any) -> None:
        (violation,) = check_sampling(replace(good, **{name: value}), LIMITS, "groups[2].sampling")
        assert violation.field == f"groups[2].sampling.{name}"
        assert str(value) in violation.description
        assert "must be" in violation.description

    check()


@given(good_samplings, st.integers(LIMITS.vocab_size, 2**32 - 1))
def test_stop_token_outside_the_vocabulary(good: Sampling, token: int) -> None:
    (violation,) = check_sampling(replace(good, stop_token_ids=(1, token)), LIMITS, "sampling")
    assert violation.field == "sampling.stop_token_ids[1]"
    assert str(token) in violation.description


@pytest.mark.parametrize(
    ("stop", "field", "says"),
    [
        (("a", ""), "s.stop[1]", "0 bytes; must be 1 to 256"),
        (("é" * 129,), "s.stop[0]", "258 bytes"),
        (("a",) * 17, "s.stop", "17 strings; at most 16"),
    ],
)
def test_stop_strings_are_few_and_short(stop: tuple[str, ...], field: str, says: str) -> None:
    (violation,) = check_sampling(Sampling(stop=stop), LIMITS, "s")
    assert violation.field == field
    assert says in violation.description


def test_a_model_without_text_has_no_stop_strings() -> None:
    (violation,) = check_sampling(Sampling(stop=("a",)), replace(LIMITS, has_text=False), "s")
    assert violation.field == "s.stop"
    assert "no tokenizer" in violation.description


def test_allowed_tokens_are_of_the_vocabulary_and_not_too_many() -> None:
    (violation,) = check_sampling(Sampling(allowed_token_ids=(5, 100)), LIMITS, "s")
    assert violation.field == "s.allowed_token_ids[1]"
    (violation,) = check_sampling(Sampling(allowed_token_ids=(5,) * 4097), LIMITS, "s")
    assert (violation.field, "at most 4096" in violation.description) == ("s.allowed_token_ids", True)


@pytest.mark.parametrize("ends", [{"stop_token_ids": (7,)}, {"stop_token_ids": (7, 1), "ignore_eos": True}])
def test_something_must_be_left_until_min_tokens(ends: dict[str, Any]) -> None:
    sampling = Sampling(allowed_token_ids=(1, 7), min_tokens=1, **ends)
    (violation,) = check_sampling(sampling, LIMITS, "s")
    assert violation.field == "s.allowed_token_ids"
    assert check_sampling(replace(sampling, min_tokens=0), LIMITS, "s") == []
    assert check_sampling(replace(sampling, allowed_token_ids=(1, 7, 8)), LIMITS, "s") == []


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"json_schema": "{"}, "s.json_schema", "no JSON"),
        ({"json_schema": "[" * 50_000}, "s.json_schema", "no JSON"),
        ({"json_schema": "[1]"}, "s.json_schema", "no JSON object"),
        ({"json_schema": '{"a":' * 65 + "1" + "}" * 65}, "s.json_schema", "64 deep"),
        ({"json_schema": '{"a":' + "[" * 64 + "]" * 64 + "}"}, "s.json_schema", "64 deep"),
        ({"json_schema": " " * (1 << 16) + "{}"}, "s.json_schema", "65536 bytes"),
        ({"allowed_token_ids": (5,)}, "s.allowed_token_ids", "together with json_schema"),
        ({"min_tokens": 1}, "s.min_tokens", "together with json_schema"),
        ({"ignore_eos": True}, "s.ignore_eos", "nothing would end"),
    ],
)
def test_a_schema_and_what_does_not_go_with_it(fields: dict[str, Any], field: str, says: str) -> None:
    (violation,) = check_sampling(Sampling(**({"json_schema": "{}"} | fields)), LIMITS, "s")
    assert violation.field == field
    assert says in violation.description


def test_a_schema_needs_text_and_something_that_ends_the_sample() -> None:
    sampling = Sampling(json_schema="{}", ignore_eos=True, stop_token_ids=(4,), stop=("x",), top_logprobs=3)
    assert check_sampling(sampling, LIMITS, "s") == []
    nested = '{"default":' * 63 + "1" + "}" * 63
    assert check_sampling(replace(sampling, json_schema=nested), LIMITS, "s") == []
    found = check_sampling(sampling, replace(LIMITS, has_text=False), "s")
    assert [violation.field for violation in found] == ["s.json_schema", "s.stop"]


def test_a_sample_that_may_neither_end_nor_go_on_names_min_tokens() -> None:
    every = tuple(range(LIMITS.vocab_size))
    asked = Sampling(min_tokens=5, stop_token_ids=every)
    (violation,) = check_sampling(asked, LIMITS, "s")
    assert violation.field == "s.min_tokens"
    assert "every token is a stop token" in violation.description
    assert check_sampling(replace(asked, min_tokens=0), LIMITS, "s") == []
    # Token 1 ends a sequence of the model.
    but_one = replace(asked, stop_token_ids=every[2:], ignore_eos=True)
    assert check_sampling(but_one, LIMITS, "s") == []


def test_all_violations_are_found_at_once() -> None:
    wrong = Sampling(temperature=math.nan, top_p=0, min_p=2, max_tokens=0, stop_token_ids=(100,))
    fields = [each.field for each in check_sampling(wrong, LIMITS, "")]
    assert fields == ["temperature", "top_p", "min_p", "max_tokens", "stop_token_ids[0]"]


def test_min_tokens_above_max_tokens() -> None:
    (violation,) = check_sampling(Sampling(max_tokens=3, min_tokens=4), LIMITS, "s")
    assert violation.field == "s.min_tokens"


def test_unset_fields_take_their_documented_defaults() -> None:
    assert resolve(None) == resolve(sample_pb2.SamplingParams()) == Sampling()
    assert Sampling().temperature == Sampling().top_p == Sampling().repetition_penalty == 1
    assert Sampling().max_tokens is None
    assert check_sampling(Sampling(), LIMITS, "s") == []


def test_zero_is_a_value_and_not_unset() -> None:
    params = sample_pb2.SamplingParams(temperature=0, top_p=0, repetition_penalty=0, max_tokens=0)
    sampling = resolve(params)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0, 0, 0)
    assert sampling.max_tokens == 0
    assert [each.field for each in check_sampling(sampling, LIMITS, "")] == [
        "top_p",
        "repetition_penalty",
        "max_tokens",
    ]


def test_every_field_of_the_message_is_taken_over() -> None:
    params = sample_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[4, 5],
        stop=["x", "yé"],
        allowed_token_ids=[3, 4],
        json_schema="{}",
        top_logprobs=6,
        prompt_logprobs=0,
        ignore_eos=True,
        logprobs_mode=sample_pb2.LOGPROBS_MODE_PROCESSED,
    )
    expected = (
        0.5,
        0.25,
        7,
        0.125,
        1.5,
        -0.5,
        0.75,
        9,
        2,
        (4, 5),
        ("x", "yé"),
        (3, 4),
        "{}",
        6,
        0,
        True,
        True,
    )
    assert resolve(params) == Sampling(*expected)


def test_unknown_logprobs_mode_is_refused() -> None:
    params = sample_pb2.SamplingParams()
    params.MergeFromString(bytes([12 << 3, 9]))
    (violation,) = check_sampling(resolve(params), LIMITS, "s")
    assert violation.field == "s.logprobs_mode"
    assert "9" in violation.description


@given(st.lists(st.integers(0, LIMITS.vocab_size - 1), min_size=1))
def test_tokens_of_the_vocabulary_pass(ids: list[int]) -> None:
    assert check_tokens(ids, LIMITS, "prompt") == []


@given(st.lists(st.integers(-5, 2**32 - 1), min_size=1))
def test_token_ids_outside_the_vocabulary_are_named(ids: list[int]) -> None:
    wrong = [index for index, token in enumerate(ids) if not 0 <= token < LIMITS.vocab_size]
    found = check_tokens(ids, LIMITS, "prompt")
    assert [each.field for each in found[:MAX_REPORTED]] == [f"prompt[{i}]" for i in wrong[:MAX_REPORTED]]
    for index, violation in zip(wrong[:MAX_REPORTED], found, strict=False):
        assert violation.description.startswith(f"{ids[index]} must be in [0, {LIMITS.vocab_size})")
    assert len(found) == min(len(wrong), MAX_REPORTED + 1)
    if len(wrong) > MAX_REPORTED:
        assert found[-1].field == "prompt"
        assert f"{len(wrong)} of {len(ids)}" in found[-1].description


def test_empty_tokens_are_refused_unless_allowed() -> None:
    (violation,) = check_tokens([], LIMITS, "prompt_token_ids")
    assert violation.field == "prompt_token_ids"
    assert check_tokens([], LIMITS, "prefix", allow_empty=True) == []


def test_repeated_field_of_a_message_can_be_checked() -> None:
    params = sample_pb2.SamplingParams(stop_token_ids=[1, 4_000_000_000])
    (violation,) = check_tokens(params.stop_token_ids, LIMITS, "ids")
    assert violation.field == "ids[1]"


@given(st.integers(1, 80), st.integers(0, 80), st.none() | st.integers(1, 64), st.integers(0, 64))
def test_lengths_pass_exactly_when_there_is_room(
    prompt: int, prefix: int, most: int | None, least: int
) -> None:
    sampling = Sampling(max_tokens=most, min_tokens=min(least, most or least))
    found = check_lengths(prompt, prefix, sampling, LIMITS, "prompt_token_ids")
    one_more = prompt + prefix + 1 <= LIMITS.max_model_len and (most is None or prefix < most)
    enough = sampling.min_tokens <= LIMITS.max_model_len - prompt
    assert (found == []) == (one_more and enough)


def test_too_long_a_prompt_says_how_long_it_may_be() -> None:
    (violation,) = check_lengths(64, 0, Sampling(), LIMITS, "prompt_token_ids")
    assert violation.field == "prompt_token_ids"
    assert "64" in violation.description


def test_a_response_may_ask_for_more_than_the_model_length_leaves() -> None:
    assert check_lengths(60, 0, Sampling(max_tokens=64), LIMITS, "prompt") == []
