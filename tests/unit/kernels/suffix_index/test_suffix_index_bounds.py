"""The index stays within its bound, gives up the right things first, and harms nothing when it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernels.suffix_index import SuffixIndex
from kernels.suffix_index.records import TEXT_COST
from tests.unit.kernels.suffix_index.reference import (
    check_memory,
    continuations,
    evidence,
    growing_text,
    held,
)

BYTES_PER_TOKEN = 200
# Arrays are never smaller than some rows, and the shared table not than its smallest size.
FEWEST_BYTES = 200_000


def used(index: SuffixIndex) -> int:
    texts = sum(1 + len(rollouts) for _, rollouts in held(index).values())
    return index.tokens + TEXT_COST * texts


def step(index: SuffixIndex, handles, texts, window: int = 4):
    cu = np.cumsum([0, *map(len, texts)])
    flat = np.array([token for text in texts for token in text], np.int32)
    return index.step(np.array(handles, np.int64), flat, cu, window)


def test_prompts_unused_for_longest_go_first_and_those_with_growing_rollouts_stay():
    index = SuffixIndex(max_tokens=400)
    busy = index.open("busy", 0, 0)
    for prompt in ("a", "b", "c"):
        index.insert(prompt, 0, 0, range(60))
    index.put_prompt("a", [])  # used again
    index.insert("d", 0, 0, range(100))
    assert set(held(index)) == {"busy", "a", "c", "d"}
    index.insert("e", 0, 0, range(300))
    assert set(held(index)) == {"busy", "e"}
    step(index, [busy], [[1, 2, 3]])
    assert growing_text(index, busy) == [1, 2, 3]


def test_then_the_oldest_versions_go():
    index = SuffixIndex(max_tokens=400)
    handles = [index.open(prompt, "growing", 9) for prompt in ("a", "b")]
    for prompt, rollout, version in (("a", 0, 3), ("b", 0, 1), ("a", 1, 2), ("b", 1, 4)):
        index.insert(prompt, rollout, version, [*range(40), version])
    assert used(index) == 4 * (41 + TEXT_COST) + 4 * TEXT_COST
    index.insert("a", 2, 5, range(100))
    assert {rollout for _, rollouts in held(index).values() for rollout in rollouts} == {"growing", 0, 1, 2}
    assert 0 not in held(index)["b"][1]
    assert 0 in held(index)["a"][1]
    step(index, handles, [[1], [2]])
    check_memory(index)


def test_a_rollout_that_cannot_fit_is_refused_and_nothing_is_lost():
    index = SuffixIndex(max_tokens=500)
    index.put_prompt("p", range(50))
    index.insert("p", 0, 0, range(100))
    index.insert("q", 0, 0, range(100))
    handle = index.open("p", 1, 0)
    step(index, [handle], [range(30)])
    before = held(index)
    for call in (
        lambda: index.insert("p", 2, 0, range(450)),
        lambda: index.insert("p", 0, 0, range(450)),
        lambda: index.insert("new", 2, 0, range(600)),
        lambda: index.put_prompt("p", range(480)),
        lambda: index.put_prompt("new", range(600)),
    ):
        with pytest.raises(ValueError, match="no room"):
            call()
        assert held(index) == before


def test_a_growing_rollout_without_room_is_halted_and_the_others_go_on():
    index = SuffixIndex(max_tokens=300)
    index.insert("old", 0, 0, range(100))
    first, second = index.open("p", 0, 0), index.open("p", 1, 0)
    step(index, [first, second], [range(100), range(50)])
    assert set(held(index)) == {"p"}
    offers = step(index, [first, second], [range(20), range(200)])
    assert offers.counts.tolist() == [4, 0]
    assert index.halted(np.array([first, second])).tolist() == [False, True]
    assert len(growing_text(index, first)) == 120
    assert growing_text(index, second) == list(range(50))
    step(index, [second, first], [range(100), range(20)])
    assert [len(growing_text(index, handle)) for handle in (first, second)] == [140, 50]
    index.close(second)
    index.close(first)
    check_memory(index)


def test_opening_without_room_is_refused():
    index = SuffixIndex(max_tokens=100)
    handle = index.open("p", 0, 0)
    step(index, [handle], [range(60)])
    with pytest.raises(ValueError, match="no room"):
        index.open("p", 1, 0)
    index.close(handle)
    index.open("p", 1, 0)


def test_a_full_index_takes_about_a_hundred_bytes_a_token():
    """docs/sizing.md says so; samples of a prompt have nothing in common here, the dearer case."""
    drawn, shares = np.random.default_rng(0), 1 / np.arange(1, 32_001) ** 1.1
    index = SuffixIndex(max_tokens=50_000)
    for number in range(30):
        text = drawn.choice(len(shares), 2000, p=shares / shares.sum())
        index.insert(number // 4, number, 0, text)
    assert 40_000 < index.tokens <= 50_000
    assert 75 < index.nbytes / index.tokens < 135


def test_texts_with_far_more_edges_than_tokens_stay_within_the_bound():
    # Behind a prompt of one token repeated, every rollout that starts differently adds an edge for each.
    index = SuffixIndex(max_tokens=3000)
    index.put_prompt("p", [0] * 1000)
    index.insert("idle", 0, 0, range(100))
    handle = index.open("p", "growing", 3)
    refused = 0
    for rollout in range(40):
        try:
            index.insert("p", rollout, rollout % 3, [rollout + 1, 100])
        except ValueError:
            refused += 1
        step(index, [handle], [[1000 + rollout]])
        # It reads every edge.
        if rollout % 5 == 4:
            check_memory(index)
    assert refused
    assert index.nbytes <= BYTES_PER_TOKEN * 3000 + FEWEST_BYTES
    tokens, rollouts = held(index)["p"]
    assert len(tokens) in (0, 1000)
    length, expected = continuations(tokens, list(rollouts.values()), growing_text(index, handle), 0.5)
    match, weights, _, _ = evidence(index, handle)
    assert (match, weights.keys()) == (length, expected.keys())


class LittleRoom(RuleBasedStateMachine):
    """Random operations on an index that is always full, beside what it says that it holds."""

    @initialize(most=st.sampled_from([60, 300]))
    def begin(self, most: int) -> None:
        self.most = most
        self.index = SuffixIndex(max_tokens=most, reach=10**6, min_match=1)
        self.open: dict = {}

    def texts(self, data) -> list[int]:
        length = data.draw(st.integers(0, self.most // 4))
        return data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))

    @rule(data=st.data(), prompt=st.integers(0, 4), rollout=st.integers(0, 3), version=st.integers(0, 3))
    def insert(self, data, prompt, rollout, version) -> None:
        if (prompt, rollout) in self.open.values():
            return
        before, text = held(self.index), self.texts(data)
        try:
            self.index.insert(prompt, rollout, version, text)
        except ValueError:
            assert held(self.index) == before
        else:
            assert held(self.index)[prompt][1][rollout] == (version, text)

    @rule(data=st.data(), prompt=st.integers(0, 4))
    def put_prompt(self, data, prompt) -> None:
        before, text = held(self.index), self.texts(data)
        try:
            self.index.put_prompt(prompt, text)
        except ValueError:
            assert held(self.index) == before
        else:
            assert held(self.index)[prompt][0] == text

    @rule(prompt=st.integers(0, 4), rollout=st.integers(0, 3), version=st.integers(0, 3))
    def start(self, prompt, rollout, version) -> None:
        if (prompt, rollout) in self.open.values():
            return
        before = held(self.index)
        try:
            self.open[self.index.open(prompt, rollout, version)] = (prompt, rollout)
        except ValueError:
            assert held(self.index) == before

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data) -> None:
        handles = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True))
        before = {handle: growing_text(self.index, handle) for handle in handles}
        texts = [self.texts(data) for _ in handles]
        offers = step(self.index, handles, texts)
        for i, handle in enumerate(handles):
            whole = before[handle] + texts[i]
            if self.index._arena.halted(handle):
                assert offers.counts[i] == 0
                assert whole[: len(before[handle])] == growing_text(self.index, handle)
            else:
                assert growing_text(self.index, handle) == whole

    @precondition(lambda self: self.open)
    @rule(data=st.data(), keep=st.booleans())
    def close(self, data, keep) -> None:
        handle = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[handle]
        self.index.close(handle, keep=keep)

    @invariant()
    def bound_holds_and_search_agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        assert used(self.index) <= self.most
        assert used(self.index) == self.index._prompts.used
        assert self.index.nbytes <= BYTES_PER_TOKEN * self.most + FEWEST_BYTES
        everything = np.array(sorted(self.open), np.int64)
        self.index.step(everything, np.empty(0, np.int32), np.zeros(len(everything) + 1, np.int64), 1)
        check_memory(self.index)
        known = held(self.index)
        for handle, (prompt, _) in self.open.items():
            tokens, rollouts = known[prompt]
            text = growing_text(self.index, handle)
            length, expected = continuations(tokens, list(rollouts.values()), text, 0.5)
            match, weights, _, _ = evidence(self.index, handle)
            assert (match, weights.keys()) == (length, expected.keys())


LittleRoom.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLittleRoom = LittleRoom.TestCase
