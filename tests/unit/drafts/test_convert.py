"""Rollouts and their messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.internal.v1 import draft_pb2 as pb
from services.contracts.errors import InvalidArgument
from services.contracts.rollout import (
    MESSAGE_BYTES,
    RolloutKind,
    StoredRollout,
    batches,
    from_proto,
    to_proto,
)
from tests.unit.drafts.rollouts import ahead, assert_same, make

rollouts = st.builds(
    lambda tokens, **fields: StoredRollout(
        tokens=np.array(tokens, np.uint32),
        logprobs=np.linspace(-9, 0, len(tokens), dtype=np.float32),
        **fields,
    ),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    run_id=st.text(min_size=1, max_size=20),
    prompt_id=st.text(min_size=1, max_size=20),
    slot=st.integers(0, 2**32 - 1),
    version=st.integers(0, 2**64 - 1),
    kind=st.sampled_from(RolloutKind),
    step=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**64 - 1),
    finished=st.booleans(),
)


def test_a_fork_comes_back_with_its_place() -> None:
    assert from_proto(to_proto(ahead(length=4, fork=3))).fork == 3


@given(rollouts)
def test_a_rollout_comes_back_as_it_was(rollout: StoredRollout) -> None:
    there = pb.Rollout.FromString(to_proto(rollout).SerializeToString())
    assert_same(from_proto(there), rollout)


def test_numbers_are_little_endian_whatever_the_array() -> None:
    rollout = make(length=3)
    swapped = StoredRollout(
        **{
            **{name: getattr(rollout, name) for name in StoredRollout.__slots__},
            "tokens": rollout.tokens.astype(">u4"),
            "logprobs": rollout.logprobs.astype(">f4"),
        }
    )
    assert to_proto(swapped) == to_proto(rollout)
    assert to_proto(rollout).token_ids[:4] == (1000).to_bytes(4, "little")


def test_log_probabilities_may_be_missing_ahead_of_the_step() -> None:
    message = to_proto(ahead(length=4))
    message.logprobs = b""
    assert from_proto(message).logprobs.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"run_id": ""}, "run_id", "is empty"),
        ({"prompt_id": ""}, "prompt_id", "is empty"),
        ({"prompt_id": "x" * 257}, "prompt_id", "257 characters"),
        ({"kind": pb.ROLLOUT_KIND_UNSPECIFIED}, "kind", "PREGENERATED or HISTORY"),
        ({"kind": 99}, "kind", "PREGENERATED or HISTORY"),
        ({"token_ids": b"", "logprobs": b""}, "token_ids", "is empty"),
        ({"token_ids": b"12345"}, "token_ids", "multiple of 4"),
        ({"logprobs": b"123"}, "logprobs", "multiple of 4"),
        ({"logprobs": b""}, "logprobs", "HISTORY needs"),
        ({"logprobs": b"1234" * 9}, "logprobs", "9 values for 10 tokens"),
        ({"fork": 3}, "fork", "is 3; must be 0 for HISTORY"),
        ({"fork": 11, "kind": pb.ROLLOUT_KIND_PREGENERATED}, "fork", "is 11; must be at most the 10 tokens"),
        ({"logprobs": np.full(10, np.nan, "<f4").tobytes()}, "logprobs", "NaN"),
    ],
)
def test_what_is_not_valid_is_named(changes: dict[str, object], field: str, said: str) -> None:
    message = to_proto(make(length=10))
    for key, value in changes.items():
        setattr(message, key, value)
    with pytest.raises(InvalidArgument) as caught:
        from_proto(message, "rollouts[3]")
    assert caught.value.violations[0].field == f"rollouts[3].{field}"
    assert said in caught.value.violations[0].description


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        from_proto(pb.Rollout())
    assert [each.field for each in caught.value.violations] == [
        "rollout.run_id",
        "rollout.prompt_id",
        "rollout.kind",
        "rollout.token_ids",
    ]


def test_messages_stay_below_their_size_and_lose_nothing() -> None:
    sent = [make(f"prompt-{number}", length=500 + number) for number in range(1000)]
    parts = list(batches(sent))
    assert len(parts) > 3
    assert all(pb.FetchRolloutsResponse(rollouts=part).ByteSize() <= MESSAGE_BYTES for part in parts)
    # Full, as far as whole rollouts go.
    assert all(
        pb.FetchRolloutsResponse(rollouts=part).ByteSize() > 0.9 * MESSAGE_BYTES for part in parts[:-1]
    )
    assert [each.prompt_id for part in parts for each in part] == [each.prompt_id for each in sent]


def test_a_rollout_larger_than_a_message_goes_alone() -> None:
    large = make("large", length=MESSAGE_BYTES // 4)
    parts = list(batches([make("a"), large, make("b")]))
    assert [[each.prompt_id for each in part] for part in parts] == [["a"], ["large"], ["b"]]


def test_nothing_makes_no_message() -> None:
    assert list(batches([])) == []
