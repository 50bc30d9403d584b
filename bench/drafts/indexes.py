"""The two indexes under test, behind one interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import numpy as np

from bench.drafts.texts import RunningGroup, Tokens
from kernels.suffix_index import SuffixIndex

WINDOW = 8
"""Tokens asked for in one step."""
ARCTIC_DEPTHS = (24, 64)
"""Depths of arctic's tree: the one that vLLM sets, and its own."""
ARCTIC_LIMITS = ((1.0, 0.1), (1000.0, 0.0))
"""Arctic's max_spec_factor and min_token_prob: its own, and none."""

Sample = tuple[int, int, RunningGroup]
"""A rollout that runs: prompt, rollout, group."""


class ComparedIndex(Protocol):
    """A suffix index under test."""

    def insert(self, prompt: int, rollout: int, group: RunningGroup) -> None:
        """Cache a rollout of a group."""

    def start(self, samples: Sequence[Sample]) -> None:
        """Track these samples from now on, and no others."""

    def keep(self, which: Sequence[int]) -> None:
        """Step only these of the samples started."""

    def step(self, new: Sequence[Tokens], window: int) -> list[list[int]]:
        """Append to each sample that is stepped, and return the proposal for each."""


class PacelineIndex:
    """The suffix index of `kernels.suffix_index`."""

    def __init__(self, max_tokens: int) -> None:
        self.index = SuffixIndex(max_tokens=max_tokens)
        self._handles: dict[tuple[int, int], int] = {}
        self._order = np.empty(0, np.int64)

    def insert(self, prompt: int, rollout: int, group: RunningGroup) -> None:
        """Cache a rollout of a group."""
        self.index.put_prompt(prompt, group.prompt)
        self.index.insert(prompt, rollout, 0, group.rollouts[rollout])

    def start(self, samples: Sequence[Sample]) -> None:
        """Track these samples from now on, and no others."""
        for handle in self._handles.values():
            self.index.close(handle)
        for prompt, _, group in samples:
            self.index.put_prompt(prompt, group.prompt)
        self._handles = {
            (prompt, rollout): self.index.open(prompt, rollout, 0) for prompt, rollout, _ in samples
        }
        self.keep(range(len(samples)))

    def keep(self, which: Sequence[int]) -> None:
        """Step only these of the samples started."""
        self._order = np.array(list(self._handles.values()), np.int64)[list(which)]

    def step(self, new: Sequence[Tokens], window: int) -> list[list[int]]:
        """Append to each sample that is stepped, and return the proposal for each."""
        cu = np.zeros(len(new) + 1, np.int64)
        np.cumsum([len(tokens) for tokens in new], out=cu[1:])
        offers = self.index.step(self._order, np.concatenate(new), cu, window)
        return [
            row[:count] for row, count in zip(offers.tokens.tolist(), offers.counts.tolist(), strict=True)
        ]


class Text:
    """A sample's prompt and response in one buffer, so that its end can be handed out without copying."""

    def __init__(self, prompt: Tokens) -> None:
        self._buffer = np.empty(2 * len(prompt) + 4096, np.int32)
        self._length = 0
        self.append(prompt)

    def append(self, tokens: Tokens) -> None:
        """Add to the end."""
        end = self._length + len(tokens)
        self._buffer[self._length : end] = tokens
        self._length = end

    def last(self, most: int) -> Tokens:
        """Return the last tokens."""
        return self._buffer[max(0, self._length - most) : self._length]


class ArcticIndex:
    """The suffix cache of arctic-inference.

    Its tree of responses knows no prompts; if `prefixed`, they are put in front of the responses.
    """

    def __init__(self, depth: int, limits: tuple[float, float], prefixed: bool) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self.cache = SuffixDecodingCache(max_tree_depth=depth)
        self._depth, (self._factor, self._least), self._prefixed = depth, limits, prefixed
        self._texts: dict[tuple[int, int], Text] = {}
        self._order: list[tuple[int, int]] = []

    def insert(self, prompt: int, rollout: int, group: RunningGroup) -> None:
        """Cache a rollout of a group."""
        name = (prompt, rollout)
        self.cache.start_request(name, group.prompt)
        text = group.rollouts[rollout]
        self.cache.add_active_response(name, np.concatenate([group.prompt, text]) if self._prefixed else text)
        self.cache.stop_request(name)

    def start(self, samples: Sequence[Sample]) -> None:
        """Track these samples from now on, and no others."""
        for name in self._texts:
            self.cache.stop_request(name)
        self._texts = {}
        for prompt, rollout, group in samples:
            self.cache.start_request((prompt, rollout), group.prompt)
            if self._prefixed:
                self.cache.add_active_response((prompt, rollout), group.prompt)
            self._texts[prompt, rollout] = Text(group.prompt)
        self.keep(range(len(samples)))

    def keep(self, which: Sequence[int]) -> None:
        """Step only these of the samples started."""
        names = list(self._texts)
        self._order = [names[i] for i in which]

    def step(self, new: Sequence[Tokens], window: int) -> list[list[int]]:
        """Append to each sample that is stepped, and return the proposal for each."""
        for name, tokens in zip(self._order, new, strict=True):
            if len(tokens):
                self.cache.add_active_response(name, tokens)
                self._texts[name].append(tokens)
        return [
            self.cache.speculate(
                name,
                self._texts[name].last(self._depth),
                window,
                max_spec_factor=self._factor,
                min_token_prob=self._least,
            ).token_ids
            for name in self._order
        ]


def arctic_missing() -> str | None:
    """Return the reason why arctic's figures are null; None if it can be imported."""
    try:
        import_module("arctic_inference.suffix_decoding")
    except ImportError as error:
        return f"arctic_inference.suffix_decoding cannot be imported: {error}"
    return None


def fill(side: ComparedIndex, groups: Sequence[RunningGroup], rollouts: int) -> float:
    """Cache the first rollouts of each group; return the seconds that it took."""
    start = time.perf_counter()
    for prompt, group in enumerate(groups):
        for rollout in range(rollouts):
            side.insert(prompt, rollout, group)
    return time.perf_counter() - start
