"""A rollout's own latest occurrences, as a source of what comes next."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.suffix_index import SuffixIndex
from kernels.suffix_index.compiled import tables


def _accepted(index: SuffixIndex, handle: int, text: list[int], window: int = 8) -> int:
    """Tokens of a text that were offered before they came, decoding step by step."""
    place = accepted = 0
    news: list[int] = []
    while place < len(text):
        offers = index.step(np.array([handle]), np.array(news, np.int32), np.array([0, len(news)]), window)
        kept = 0
        for token in offers.tokens[0, : offers.counts[0]].tolist():
            if place + kept + 1 >= len(text) or token != text[place + kept]:
                break
            kept += 1
        news = text[place : place + kept + 1]
        place, accepted = place + len(news), accepted + kept
    return accepted


def test_what_the_rollout_said_last_wins_where_it_keeps_being_right():
    index = SuffixIndex(max_tokens=100_000)
    index.put_prompt("p", [1])
    rng = np.random.default_rng(0)
    # In all other texts 5 6 is followed by 7; in this one by what followed it the last time, which changes now and
    # then.
    for name in range(6):
        index.insert("p", name, 0, [5, 6, 7, 9] * 20)
    text: list[int] = []
    for value in range(20, 40):
        text += [5, 6, value, *rng.integers(50, 1000, 2).tolist()] * 6
    handle = index.open("p", "own", 0)
    accepted = _accepted(index, handle, text)
    # Of each five tokens 6 and the value can be known, or all five, within the six repetitions.
    assert accepted > 0.6 * len(text)
    index.step(np.array([handle]), np.array([5, 6, 777, 5, 6], np.int32), np.array([0, 5]), 1)
    offers = index.step(np.array([handle]), np.array([], np.int32), np.array([0, 0]), 1)
    assert offers.tokens[0, 0] == 777


def test_each_rollout_has_occurrences_of_its_own():
    index = SuffixIndex(max_tokens=100_000)
    one, other = index.open("p", "one", 0), index.open("q", "other", 0)
    text = [3, 4, 5] * 40
    _accepted(index, one, text)
    cu = np.array([0, 2])
    offers = index.step(np.array([other]), np.array([3, 4], np.int32), cu, 1)
    # The shared table knows what follows 3 4; the other rollout's own text does not vote on it.
    assert offers.counts[0] == 1
    found = np.zeros(len(tables.RECENT_ORDERS), np.int64)
    hashes = np.zeros(16, np.uint64)
    tables.look_up_recent.py_func(np.zeros(64, np.uint64), hashes, 3, np.uint64(7), found)
    assert found.tolist() == [-1] * len(tables.RECENT_ORDERS)


@given(
    st.lists(st.integers(-1, 3), min_size=len(tables.RECENT_ORDERS), max_size=len(tables.RECENT_ORDERS)),
    st.integers(0, 3),
)
def test_votes_tell_which_contexts_are_for_and_against(found, token):
    vote = int(tables.votes.py_func(np.array(found), token))
    assert 0 <= vote < tables.VOTES
    pros = [i for i, each in enumerate(found) if each == token]
    cons = [i for i, each in enumerate(found) if each not in (token, -1)]
    assert tables.most_known(vote) == (max(pros, default=-1), max(cons, default=-1))
