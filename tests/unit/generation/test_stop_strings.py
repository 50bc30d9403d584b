"""Stop strings end a response where its text first has one, however its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.sampling import Sampling
from services.generation.engine.text import StopSearch, StopStrings
from services.generation.engine.types import Finish, SampleStep

# Few letters, so that strings begin, fail and overlap all the time; a character of two bytes in two tokens.
PIECES = [b"", b"a", b"b", b"ab", b"ba", b"aab", "é".encode()[:1], "é".encode()[1:], b"c"]
tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=30)
stops = st.lists(st.text("abcé", min_size=1, max_size=4), min_size=1, max_size=3)


def _expected(response: Sequence[int], stop: Sequence[str], least: int) -> tuple[int, int] | None:
    """Return the length at which a response ends, and by which string, by looking at all of its text each time."""
    for length in range(1, len(response) + 1):
        before = b"".join(PIECES[token] for token in response[: length - 1])
        text = b"".join(PIECES[token] for token in response[:length])
        ends = []
        for index, each in enumerate(stop):
            places = [i for i in range(len(text)) if text[i:].startswith(each.encode())]
            ends += [(i + len(each.encode()), index) for i in places if i + len(each.encode()) > len(before)]
        if ends and length > least:
            return length, min(ends)[1]
    return None


@given(tokens, stops, st.integers(0, 5), st.lists(st.integers(1, 4), max_size=30), st.integers(0, 30))
def test_a_response_ends_at_its_first_stop_string(
    response: list[int], stop: list[str], least: int, sizes: list[int], known: int
) -> None:
    """In steps of any sizes, and resumed behind any beginning that did not end it."""
    expected = _expected(response, stop, least)
    if expected is not None:
        known = min(known, expected[0] - 1)
    for skipped in (0, known):
        search = StopSearch(stop, least)
        search.skip([PIECES[token] for token in response[:skipped]])
        place, found = skipped, None
        for size in [*sizes, *[1] * len(response)]:
            part = [PIECES[token] for token in response[place : place + size]]
            if (found := search.find(part)) is not None:
                found = (place + found[0], found[1])
                break
            place += len(part)
        assert found == expected


def _step(token_ids: list[int], finish: Finish | None = None, **fields: object) -> SampleStep:
    return SampleStep("s", token_ids, [-1.0] * len(token_ids), finish, **fields)  # type: ignore[arg-type]


def test_a_step_is_cut_behind_the_stop_string() -> None:
    watched = StopStrings(PIECES)
    watched.begin("s", Sampling(stop=("c", "bb")), [1, 2])
    step = _step([5, 2, 1], drafted=2, accepted=2, reused=3, verified_logprobs=(-1.0, -2.0, -3.0))
    assert watched.cut(step)
    assert (step.token_ids, step.logprobs) == ([5, 2], [-1.0, -1.0])
    assert (step.finish, step.stop_string) == (Finish.STOP, "bb")
    assert (step.drafted, step.accepted, step.reused) == (2, 2, 2)
    assert step.verified_logprobs == (-1.0, -2.0)
    assert not watched


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP, Finish.ERROR])
def test_a_stop_string_goes_before_any_other_end_of_the_same_step(finish: Finish) -> None:
    watched = StopStrings(PIECES)
    watched.begin("s", Sampling(stop=("c",)), [])
    step = _step([8, 1], finish)
    assert not watched.cut(step), "it has ended already"
    assert (step.token_ids, step.finish, step.stop_string) == ([8], Finish.STOP, "c")


def test_samples_end_otherwise_as_ever() -> None:
    watched = StopStrings(PIECES)
    watched.begin("s", Sampling(stop=("c",)), [])
    watched.begin("other", Sampling(), [])
    assert len(watched) == 1
    step = _step([1, 1])
    assert not watched.cut(step)
    assert step.finish is None
    step = _step([1], Finish.LENGTH)
    assert not watched.cut(step)
    assert (step.finish, step.stop_string) == (Finish.LENGTH, "")
    assert not watched


def test_a_sample_that_came_with_tokens_goes_on_behind_them() -> None:
    watched = StopStrings(PIECES)
    watched.begin("s", Sampling(stop=("aba",)), [1])
    watched.skip("s", [2])
    assert watched.cut(step := _step([1]))
    assert step.stop_string == "aba"
    watched.begin("gone", Sampling(stop=("a",)), [])
    watched.end("gone")
    assert not watched


@pytest.mark.parametrize(("response", "stop"), [([1, 2], "ab"), ([2, 1], ""), ([1, 2, 1], ""), ([5], "ab")])
def test_a_prefix_is_whole_if_its_last_token_completes_a_stop_string(response: list[int], stop: str) -> None:
    assert StopStrings(PIECES).ended_by(Sampling(stop=("ab",)), response) == stop
    assert StopStrings(PIECES).ended_by(Sampling(stop=("ab",), min_tokens=3), response) == ""


def test_without_text_there_are_no_stop_strings() -> None:
    watched = StopStrings(None)
    assert not watched.has_text
    watched.begin("s", Sampling(), [1])
    with pytest.raises(ValueError, match="no tokenizer"):
        watched.begin("s", Sampling(stop=("a",)), [])
