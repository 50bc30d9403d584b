"""The index is what a brute-force search over all texts says, whatever was done to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernels.suffix_index import SuffixIndex
from tests.unit.kernels.suffix_index.reference import (
    check_memory,
    continuations,
    evidence,
    growing_text,
    held,
)

PROMPTS = st.sampled_from(["p", 7, ("q", 1)])
ROLLOUTS = st.sampled_from(["a", "b", 3, (3, "c")])
VERSIONS = st.integers(0, 5)
TOKENS = st.lists(st.integers(0, 2), max_size=12)
DECAY = 0.5


class AnyOrder(RuleBasedStateMachine):
    """Random operations beside a model that keeps plain lists."""

    @initialize(shared_alphabet=st.sampled_from([1, 40]))
    def begin(self, shared_alphabet: int) -> None:
        # With few prompts alphabets of three tokens make deep automata; spread tokens make wide ones.
        self.spread = shared_alphabet
        self.index = SuffixIndex(max_tokens=100_000, decay=DECAY, reach=10**6, min_match=1)
        self.model: dict = {}
        self.open: dict = {}

    def entry(self, prompt) -> tuple[list, dict]:
        return self.model.setdefault(prompt, ([], {}))

    def tidy(self, prompt) -> None:
        tokens, rollouts = self.model[prompt]
        if not tokens and not rollouts:
            del self.model[prompt]

    def growing(self, prompt, rollout) -> bool:
        return (prompt, rollout) in self.open.values()

    @rule(prompt=PROMPTS, tokens=TOKENS.filter(bool))
    def put_prompt(self, prompt, tokens) -> None:
        self.index.put_prompt(prompt, tokens)
        self.model[prompt] = (tokens, self.entry(prompt)[1])

    @rule(prompt=PROMPTS, rollout=ROLLOUTS, version=VERSIONS, tokens=TOKENS)
    def insert(self, prompt, rollout, version, tokens) -> None:
        if self.growing(prompt, rollout):
            with pytest.raises(ValueError, match="growing"):
                self.index.insert(prompt, rollout, version, tokens)
            return
        self.index.insert(prompt, rollout, version, tokens)
        self.entry(prompt)[1][rollout] = (version, tokens)

    @rule(prompt=PROMPTS, rollout=ROLLOUTS, version=VERSIONS)
    def start(self, prompt, rollout, version) -> None:
        if self.growing(prompt, rollout):
            with pytest.raises(ValueError, match="growing"):
                self.index.open(prompt, rollout, version)
            return
        self.open[self.index.open(prompt, rollout, version)] = (prompt, rollout)
        self.entry(prompt)[1][rollout] = (version, [])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data) -> None:
        handles = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True))
        texts = [[token * self.spread for token in data.draw(TOKENS)] for _ in handles]
        cu = np.cumsum([0, *map(len, texts)])
        flat = np.array([token for text in texts for token in text], np.int32)
        offers = self.index.step(np.array(handles, np.int64), flat, cu, 4)
        for handle, text in zip(handles, texts, strict=True):
            prompt, rollout = self.open[handle]
            version, before = self.model[prompt][1][rollout]
            self.model[prompt][1][rollout] = (version, before + text)
        assert ((offers.counts >= 0) & (offers.counts <= 4)).all()
        for row, count in enumerate(offers.counts):
            assert (offers.tokens[row, :count] >= 0).all()
            assert ((offers.shares[row, :count] > 0) & (offers.shares[row, :count] <= 1)).all()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), keep=st.booleans())
    def close(self, data, keep) -> None:
        handle = data.draw(st.sampled_from(sorted(self.open)))
        prompt, rollout = self.open.pop(handle)
        self.index.close(handle, keep=keep)
        if not keep:
            del self.model[prompt][1][rollout]
            self.tidy(prompt)
        with pytest.raises(KeyError):
            self.index.close(handle)

    @rule(prompt=PROMPTS, rollout=ROLLOUTS)
    def remove(self, prompt, rollout) -> None:
        if self.growing(prompt, rollout):
            with pytest.raises(ValueError, match="growing"):
                self.index.remove(prompt, rollout)
            return
        known = rollout in self.model.get(prompt, ([], {}))[1]
        assert self.index.remove(prompt, rollout) is known
        if known:
            del self.model[prompt][1][rollout]
            self.tidy(prompt)

    @rule(prompt=PROMPTS)
    def drop(self, prompt) -> None:
        assert self.index.drop(prompt) is (prompt in self.model)
        self.model.pop(prompt, None)
        self.open = {handle: name for handle, name in self.open.items() if name[0] != prompt}

    @rule()
    def save_and_load(self) -> None:
        saved = self.index.dump()
        self.index = SuffixIndex.load(saved)
        self.open = {}
        assert held(self.index) == self.model
        assert list(held(self.index)) == list(held(SuffixIndex.load(self.index.dump())))

    @invariant()
    def holds_what_was_put_in(self) -> None:
        if hasattr(self, "index"):
            assert held(self.index) == self.model
            texts = [text for _, rollouts in self.model.values() for _, text in rollouts.values()]
            tokens = sum(map(len, texts)) + sum(len(tokens) for tokens, _ in self.model.values())
            assert self.index.tokens == tokens

    @invariant()
    def memory_is_sound(self) -> None:
        if hasattr(self, "index"):
            check_memory(self.index)

    @invariant()
    def finds_what_a_search_finds(self) -> None:
        if not hasattr(self, "index"):
            return
        everything = np.array(sorted(self.open), np.int64)
        self.index.step(everything, np.empty(0, np.int32), np.zeros(len(everything) + 1, np.int64), 1)
        for handle, (prompt, _) in self.open.items():
            tokens, rollouts = self.model[prompt]
            text = growing_text(self.index, handle)
            length, expected = continuations(tokens, list(rollouts.values()), text, DECAY)
            match, weights, total, best = evidence(self.index, handle)
            assert match == length
            assert weights.keys() == expected.keys()
            if expected:
                scale = sum(expected.values())
                for token, weight in expected.items():
                    assert weights[token] / total == pytest.approx(weight / scale, rel=1e-4)
                assert best / total == pytest.approx(max(expected.values()) / scale, rel=1e-4)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
