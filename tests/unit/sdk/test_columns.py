"""Columns of tokens: whatever is done to them, each column does."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.columns import COLUMNS, TokenBuffer, TokenLists, VersionRun, arrays_of, mismatch
from paceline.v1 import sample_pb2
from tests.support.token_columns import columns

PARTS = st.lists(st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 2)), max_size=5)


def message(tokens: list[int], version: int | None, top: int) -> sample_pb2.TokenColumns:
    return columns(
        tokens,
        [-token / 4 for token in range(len(tokens))],
        version,
        top_token_ids=[token // 2 + place for token in tokens for place in range(top)],
        top_logprobs=[-place / 2 for _ in tokens for place in range(top)],
    )


@given(PARTS, st.integers(0, 2), st.integers(0, 200), st.integers(0, 200))
def test_parts_make_the_whole_and_the_whole_makes_parts(
    parts: list[tuple[list[int], int]], top: int, one: int, other: int
) -> None:
    buffer, whole = TokenBuffer(), sample_pb2.TokenColumns()
    for tokens, version in parts:
        new = message(tokens, version if tokens else None, top)
        buffer.extend(new, new.versions)
        whole.MergeFrom(new)
    of_each = [run.policy_version for run in whole.versions for _ in range(run.tokens)]
    count = len(of_each)
    begin, end = sorted((min(one, count), min(other, count)))
    part = buffer.message(begin, end)
    assert list(part.token_ids) == whole.token_ids[begin:end]
    assert list(part.logprobs) == whole.logprobs[begin:end]
    assert list(part.top_token_ids) == whole.top_token_ids[top * begin : top * end]
    assert list(part.top_logprobs) == whole.top_logprobs[top * begin : top * end]
    runs = [VersionRun(len([*same]), version) for version, same in groupby(of_each[begin:end])]
    assert buffer.runs(begin, end) == runs
    assert sample_pb2.TokenColumns.FromString(buffer.serialized(begin, end)) == part
    sampling = sample_pb2.SamplingParams(top_logprobs=top)
    assert [mismatch(part), mismatch(part, sampling)] == ["", ""]
    assert arrays_of(part)["top_token_ids"].shape == (end - begin, top if end > begin else 0)
    buffer.cut(begin)
    assert buffer.message() == beginning_of(whole, begin)
    buffer.clear()
    assert buffer.message() == sample_pb2.TokenColumns()


def beginning_of(whole: sample_pb2.TokenColumns, count: int) -> sample_pb2.TokenColumns:
    made = TokenBuffer()
    made.extend(whole, whole.versions)
    return made.message(0, count)


def test_lists_are_taken_once_with_their_version() -> None:
    lists = TokenLists()
    lists.extend(message([5, 6], None, 1))
    lists.extend(message([7], None, 1))
    assert all(len(getattr(lists, column.name)) == 3 for column in COLUMNS)
    taken = lists.take(3, mixed_kv=True)
    assert (list(taken.token_ids), list(taken.top_token_ids)) == ([5, 6, 7], [2, 3, 3])
    assert list(taken.versions) == [sample_pb2.VersionRun(tokens=3, policy_version=3, mixed_kv=True)]
    assert (len(lists), lists.take(None)) == (0, sample_pb2.TokenColumns())


@pytest.mark.parametrize("column", ["token_ids", "logprobs", "top_token_ids", "top_logprobs", "versions"])
def test_a_column_that_lacks_an_entry_is_noticed(column: str) -> None:
    broken = message([5, 6, 7], 1, 2)
    if column == "versions":
        broken.versions[0].tokens = 2
    else:
        getattr(broken, column).pop()
    assert mismatch(broken, sample_pb2.SamplingParams(top_logprobs=2))
    assert mismatch(broken)
    assert mismatch(message([5], 1, 2), sample_pb2.SamplingParams(top_logprobs=1))
