"""The first field in which two requests differ is named, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import convert
from paceline import types as t
from paceline.v1 import rollout_pb2 as pb
from services.gateway.api.validation import first_difference
from tests.support.random_messages import RandomMessages

GROUPS = [t.Group("p0", [1, 2, 3], 4), t.Group("p1", [1, 2], 4, t.SamplingParams(top_p=0.5))]
SAMPLING = t.SamplingParams(max_tokens=512, stop=("x",))


def request(**changes: Any) -> pb.SubmitRolloutsRequest:
    given = {"sampling": SAMPLING, "deadline": 2.0, "run_seed": 7, **changes}
    batch = t.Batch("r", "b", 1, 2, given.pop("groups", GROUPS), **given)
    return convert.batch_to_proto(batch, pb.SubmitRolloutsRequest)


@pytest.mark.parametrize(
    ("changes", "field", "how"),
    [
        ({"groups": GROUPS[::-1]}, "groups[0].prompt_id", "was 'p0', is 'p1'"),
        ({"groups": GROUPS[:1]}, "groups", "had 2 items, has 1"),
        (
            {"groups": [t.Group("p0", [1, 9, 3], 4), GROUPS[1]]},
            "groups[0].prompt_token_ids[1]",
            "was 2, is 9",
        ),
        ({"groups": [GROUPS[0], t.Group("p1", [1, 2], 4)]}, "groups[1].sampling", "was a message, is unset"),
        (
            {"sampling": t.SamplingParams(max_tokens=256, stop=("x",))},
            "sampling.max_tokens",
            "was 512, is 256",
        ),
        ({"sampling": t.SamplingParams(stop=("x",))}, "sampling.max_tokens", "was 512, is unset"),
        ({"sampling": t.SamplingParams(max_tokens=512)}, "sampling.stop", "had 1 items, has 0"),
        (
            {"exactness": t.Exactness(t.ExactnessLevel.REJECTION)},
            "exactness.level",
            "was 'EXACTNESS_LEVEL_EXACT', is 'EXACTNESS_LEVEL_REJECTION'",
        ),
        ({"run_seed": 8}, "run_seed", "was 7, is 8"),
        ({"deadline": 3.0}, "deadline.seconds", "was 2, is 3"),
        ({"max_staleness": 1}, "max_staleness", "was unset, is 1"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], field: str, how: str) -> None:
    assert first_difference(request(), request(**changes)) == (field, how)


def test_groups_of_an_open_batch_are_passed_over() -> None:
    assert first_difference(request(), request(groups=[]), ["groups"]) == ("", "")


@given(st.integers(0, 2**32))
def test_whatever_is_changed_a_field_is_named(seed: int) -> None:
    one = request()
    other = RandomMessages(seed, ["p0"]).mutate(one)
    field, how = first_difference(one, other)
    assert bool(field) == bool(how) == (one != other)
