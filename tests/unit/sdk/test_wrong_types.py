"""Whatever a trainer gives for a field: it is sent as it was meant, or refused by the field's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import InvalidArgumentError, convert
from paceline import types as t
from paceline.v1 import rollout_pb2
from tests.unit.sdk.anything import anything

SAMPLING = t.SamplingParams()
GROUP = t.Group("p", [1, 2], 2, SAMPLING)
BATCH = t.Batch("r", "b", 1, 2, [GROUP], max_staleness=1, deadline=1.0)
RECORDS: list[tuple[Any, Callable[[Any], Any], str]] = [
    (SAMPLING, convert.sampling_to_proto, "sampling."),
    (t.Exactness.lenient(2.0), convert.exactness_to_proto, "exactness."),
    (t.ToolUse((1,), ("x",), 2, 3.0), convert.tools_to_proto, "tools."),
    (GROUP, lambda group: convert.groups_to_proto([group]), "groups[0]."),
    (GROUP, lambda group: convert.whole_groups([group]), "groups[0]."),
    (BATCH, lambda batch: convert.batch_to_proto(batch, rollout_pb2.SubmitRolloutsRequest), ""),
    (BATCH, lambda batch: convert.batch_to_proto(batch, rollout_pb2.OpenBatchRequest), ""),
    (t.BatchHint("r", 1, 2, [GROUP]), convert.hint_to_proto, ""),
    (t.SampleRequest("r", "p", [1]), convert.sample_request_to_proto, ""),
    (
        t.Continuation("p", 0, 1, [1]),
        lambda each: convert.continuations_to_proto([each]),
        "continuations[0].",
    ),
    (t.Reward("p", 0, 1.0), lambda each: convert.rewards_to_proto([each]), "rewards[0]."),
    (t.SampleKey("p", 0), lambda each: convert.keys_to_proto([each]), "samples[0]."),
]
"""One of each public type of a request, how it is converted, and the path of its fields."""
TAKEN: list[tuple[Any, list[int]]] = [
    ((1, 2), [1, 2]),
    (range(3), [0, 1, 2]),
    ((each for each in (4, 5)), [4, 5]),
    (np.array([1, 2], np.int32), [1, 2]),
    (np.array([[1, 2]]), [1, 2]),
    ([[1, 2]], [1, 2]),
    ([1.0, np.float32(2.0), np.int8(3)], [1, 2, 3]),
    (np.array([2**32 - 1], np.uint64), [2**32 - 1]),
    (np.array([7.0, 8.0]), [7, 8]),
    ([np.array(3), 4], [3, 4]),
    ([], []),
    (np.empty((1, 0), np.int64), []),
]
"""Prompts as trainers have them."""
REFUSED: list[tuple[Any, str]] = [
    (
        t.Group("p", [1, -100], 1),
        "groups[1].prompt_token_ids[1]: -100 must be an integer from 0 to 4294967295; this value marks labels "
        "that a loss ignores: leave it out",
    ),
    (t.Group("p", [1, 1.5], 1), "groups[1].prompt_token_ids[1]: 1.5 must be an integer from 0 to 4294967295"),
    (t.Group("p", np.array([1.0, np.nan]), 1), "groups[1].prompt_token_ids[1]: nan must be an integer from"),
    (
        t.Group("p", np.ones((2, 3), int), 1),
        "groups[1].prompt_token_ids: has the shape [2, 3]; must be a row of",
    ),
    (t.Group("p", b"ab", 1), "groups[1].prompt_token_ids: b'ab' must be a sequence of integers"),
    (t.Group("p", "ab", 1), "groups[1].prompt_token_ids: 'ab' must be a sequence of integers"),
    (t.Group("p", np.array([5000], np.float16), 1), "groups[1].prompt_token_ids[0]: "),
    (t.Group("p", [True], 1), "groups[1].prompt_token_ids[0]: True must be an integer"),
    (t.Group("p", [1], -1), "groups[1].samples: -1 must be an integer from 0 to 4294967295"),
    (t.Group(5, [1], 1), "groups[1].prompt_id: 5 must be a string"),  # type: ignore[arg-type]
    (t.Group("\ud83d", [1], 1), "groups[1].prompt_id: '\\ud83d' must be Unicode, without surrogates"),
    (
        t.Group("p", [1], 1, t.SamplingParams(max_tokens=1.5)),
        "groups[1].sampling.max_tokens: 1.5 must be an integer",
    ),  # type: ignore[arg-type]
    (
        t.Group("p", [1], 1, t.SamplingParams(stop_token_ids=2)),
        "groups[1].sampling.stop_token_ids: 2 must be a seq",
    ),  # type: ignore[arg-type]
    ({"prompt_id": "p"}, "groups[1]: a value of the type dict must be a paceline.Group"),
]
"""Invalid groups, and their errors."""


@pytest.mark.parametrize(("whole", "to_proto", "at"), RECORDS, ids=lambda each: type(each).__name__)
@settings(max_examples=120)
@given(data=st.data())
def test_a_field_is_converted_or_refused_by_its_name(
    whole: Any, to_proto: Callable[[Any], Any], at: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([each.name for each in fields(whole)]))
    try:
        to_proto(replace(whole, **{name: data.draw(anything)}))
    except InvalidArgumentError as error:
        (violation,) = error.violations
        assert violation.field.startswith(f"{at}{name}")
        assert "must be" in violation.description or "cannot be read" in violation.description


@pytest.mark.parametrize(("prompt", "ids"), TAKEN)
def test_prompts_are_taken_as_trainers_have_them(prompt: Any, ids: list[int]) -> None:
    (group,) = convert.whole_groups([t.Group("p", prompt, 1)])
    assert group.prompt_token_ids == ids
    assert list(convert.groups_to_proto([group])[0].prompt_token_ids) == ids


@pytest.mark.parametrize(("group", "said"), REFUSED)
def test_a_refusal_names_group_field_and_value(group: Any, said: str) -> None:
    for to_proto in (convert.groups_to_proto, convert.whole_groups):
        with pytest.raises(InvalidArgumentError) as caught:
            to_proto([GROUP, group])
        assert caught.value.message.startswith(said)


def test_whole_floats_and_schemas_as_mappings_are_taken() -> None:
    params = t.SamplingParams(max_tokens=512.0, top_k=np.int64(3), json_schema={"type": "object"}, stop="x")  # type: ignore[arg-type]
    message = convert.sampling_to_proto(params)
    assert (message.max_tokens, message.top_k, message.json_schema) == (512, 3, '{"type": "object"}')
    assert list(message.stop) == ["x"]


@pytest.mark.parametrize("reward", [None, float("nan"), np.float32("inf"), "1.0", True, 10**400])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"rewards\[0\]\.reward: .* must be a"):
        convert.rewards_to_proto([t.Reward("p", 0, reward)])
