"""Instance records as JSON, and the names of keys."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.platform.redis.connection import Keys
from services.platform.redis.registry import InstanceRecord
from services.platform.security.guard import bearer_token

records = st.builds(
    InstanceRecord,
    service=st.text(),
    instance_id=st.text(),
    epoch=st.integers(0, 2**53),
    state=st.sampled_from(["stale", "serving"]),
    policy_version=st.integers(0, 2**64 - 1),
    load=st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False)),
    registered_at=st.floats(0, 1e12),
)


@given(records)
def test_a_record_survives_json(record: InstanceRecord) -> None:
    assert InstanceRecord.from_json(record.to_json()) == record
    assert InstanceRecord.from_json(record.to_json().encode()) == record


def test_fields_of_a_later_version_are_ignored() -> None:
    text = json.dumps({"service": "s", "instance_id": "i", "epoch": 2, "colour": "red"})
    assert InstanceRecord.from_json(text) == InstanceRecord("s", "i", epoch=2)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"service": "s"}', "\x00"])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|not an instance record"):
        InstanceRecord.from_json(text)


def tag(key: str) -> str:
    return key[key.index("{") + 1 : key.index("}")]


def test_keys_of_one_batch_share_a_slot() -> None:
    keys = Keys("ns")
    assert keys.batch("r", "b", "journal") == "ns:{r:b}:journal"
    assert tag(keys.batch("r", "b", "events")) == "r:b"


def test_keys_of_one_registered_service_share_a_slot() -> None:
    keys = Keys("ns")
    all_keys = [keys.registry("s", "i"), keys.registry_index("s"), keys.epoch("s", "i")]
    assert len(set(all_keys)) == 3
    assert {tag(key) for key in all_keys} == {"registry:s"}


@pytest.mark.parametrize("value", ["Bearer abc", "bearer abc"])
def test_the_right_token_is_let_in(value: str) -> None:
    assert bearer_token(value) == "abc"


@pytest.mark.parametrize(
    "value", ["", "abc", "Bearer", "Bearer ", "Bearer ab", "Bearer abcd", "Basic abc", "Bearer é"]
)
def test_any_other_is_not(value: str) -> None:
    assert bearer_token(value) != "abc"
