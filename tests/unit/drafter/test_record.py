"""The record of what is published, and the learner's own state on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.learner import DrafterHistory, PublishedDrafter
from services.drafter.training.session import LEARNER, MANIFEST, Manifest, States

published = st.builds(
    PublishedDrafter,
    st.integers(1, 10**6),
    st.text(max_size=20),
    st.text("0123456789abcdef", max_size=8),
    st.floats(0, 9),
    st.integers(0, 99),
    st.floats(0, 1e9),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)


@given(st.none() | published, st.lists(published, max_size=4))
def test_a_record_is_read_as_it_was_written(
    current: PublishedDrafter | None, earlier: list[PublishedDrafter]
) -> None:
    history = DrafterHistory(current, tuple(earlier))
    assert DrafterHistory.from_json(history.to_json()) == history


@given(st.lists(published, min_size=1, max_size=8), st.integers(1, 4))
def test_going_back_goes_the_way_that_publishing_came(versions: list[PublishedDrafter], keep: int) -> None:
    history = DrafterHistory()
    for each in versions:
        history = history.with_published(each, keep)
    for expected in versions[::-1][1 : keep + 1]:
        back = history.rolled_back()
        assert back is not None
        history = back
        assert history.current == expected
    assert history.rolled_back() is None


@pytest.mark.parametrize("text", ["3", "[]", '{"current": {"version": 1}}', "no json"])
def test_what_is_no_record_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        DrafterHistory.from_json(text)


def write(states: States, manifest: Manifest) -> Path:
    fresh = states.new()
    (fresh / LEARNER).write_text(str(manifest.updates))
    return states.commit(fresh, manifest)


def test_the_latest_state_comes_first_and_few_are_kept(tmp_path: Path) -> None:
    states = States(tmp_path / "state")
    assert list(states.latest()) == []
    for number in range(4):
        write(states, Manifest(updates=number, used=("1-0", "2-0"), forced=(2**64 - 1,)))
    found = list(states.latest())
    assert [manifest.updates for _, manifest in found] == [3, 2]
    assert found[0][1] == Manifest(updates=3, used=("1-0", "2-0"), forced=(2**64 - 1,))
    assert (found[0][0] / LEARNER).read_text() == "3"
    assert len(list((tmp_path / "state").iterdir())) == 2


def test_half_a_state_and_a_broken_one_are_passed_over(tmp_path: Path) -> None:
    states = States(tmp_path)
    write(states, Manifest(updates=1))
    broken = write(states, Manifest(updates=2))
    (broken / MANIFEST).write_text("{")
    (states.new() / LEARNER).write_text("never committed")
    assert [manifest.updates for _, manifest in states.latest()] == [1]
    write(States(tmp_path), Manifest(updates=3))
    assert not list(tmp_path.glob(".*")), "what nobody committed is removed"
