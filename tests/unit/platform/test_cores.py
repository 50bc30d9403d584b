"""Shares of processor cores."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.platform.launching import bind_ranks, cpu_list, parse_cpu_list, share_cores


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_are_equal_and_overlap_only_when_cores_are_few(cores: int, shares: int) -> None:
    made = [share_cores(range(cores), shares, index) for index in range(shares)]
    assert len({len(share) for share in made}) == 1
    assert made[0]
    if cores >= shares:
        used = [core for share in made for core in share]
        assert len(used) == len(set(used))


@given(st.lists(st.integers(0, 999), min_size=1))
def test_a_list_is_read_as_it_was_written(cores: list[int]) -> None:
    assert parse_cpu_list(cpu_list(cores)) == tuple(cores)


@pytest.mark.parametrize(
    ("told", "ranks", "expected"),
    [
        (None, 1, None),
        ("0-3", 1, "0-3"),
        ("0-3,8", 2, "0,1|2,3"),
        ("4,6", 2, "4|6"),
        ("5", 2, "5|5"),
        ("0,1|2,3", 2, "0,1|2,3"),
        ("nobind", 2, "nobind"),
    ],
)
def test_ranks_share_the_cores_of_their_instance(told: str | None, ranks: int, expected: str | None) -> None:
    assert bind_ranks(told, ranks) == expected


def test_ranks_share_all_cores_where_none_are_named() -> None:
    bound = bind_ranks(None, 2)
    assert bound is not None
    used = {core for share in bound.split("|") for core in parse_cpu_list(share)}
    assert used <= os.sched_getaffinity(0)


@pytest.mark.parametrize("told", ["-", "a-b", "1,,2", "1;2"])
def test_no_list_of_cores_is_refused(told: str) -> None:
    with pytest.raises(ValueError, match="no list of cores"):
        bind_ranks(told, 2)
