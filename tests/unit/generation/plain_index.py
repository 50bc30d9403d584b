"""The suffix index as a search through lists: holds texts by prompt and proposes what followed a pair of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.suffix_index import Continuations, Name

_MATCH = 2


@dataclass(slots=True)
class PlainIndex:
    """As `SuffixIndex`: rules of names included. `most_tokens` is what a prompt or a rollout may have.

    A growing rollout that would have more is halted.
    """

    most_tokens: int = 1 << 30
    prompts: dict[Name, list[int]] = field(default_factory=dict)
    texts: dict[tuple[Name, Name], list[int]] = field(default_factory=dict)
    versions: dict[tuple[Name, Name], int] = field(default_factory=dict)
    growing: dict[int, tuple[Name, Name]] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    full: set[int] = field(default_factory=set)

    def has(self, prompt: Name, rollout: Name) -> bool:
        return (prompt, rollout) in self.texts

    def put_prompt(self, prompt: Name, tokens: Any) -> None:
        self._fits(tokens)
        assert prompt in self.prompts or all(owner != prompt for owner, _ in self.texts), "built twice"
        self.prompts[prompt] = [int(token) for token in tokens]

    def insert(self, prompt: Name, rollout: Name, version: int, tokens: Any) -> None:
        self._fits(tokens)
        if (prompt, rollout) in self.growing.values():
            raise ValueError("growing")
        assert (prompt, rollout) not in self.texts, "taken out to be replaced"
        self.texts[prompt, rollout] = [int(token) for token in tokens]
        self.versions[prompt, rollout] = version

    def open(self, prompt: Name, rollout: Name, version: int) -> int:
        if (prompt, rollout) in self.growing.values():
            raise ValueError("growing")
        assert (prompt, rollout) not in self.texts, "taken out to be replaced"
        handle = len(self.growing) + len(self.texts) + 100
        self.growing[handle] = (prompt, rollout)
        self.texts[prompt, rollout] = []
        self.versions[prompt, rollout] = version
        return handle

    def close(self, handle: int, *, keep: bool = True) -> None:
        text = self.growing.pop(handle)
        if not keep:
            del self.texts[text]

    def step(
        self, handles: Any, tokens: Any, cu: Any, window: int, branches: int = 0, asked: Any = None
    ) -> Continuations:
        assert handles.dtype == cu.dtype == np.int64
        assert tokens.dtype == np.int32
        assert len(set(handles.tolist())) == len(handles)
        assert len(cu) == len(handles) + 1
        assert cu[-1] == len(tokens)
        self.batches.append(len(handles))
        for i, handle in enumerate(handles.tolist()):
            more = tokens[cu[i] : cu[i + 1]].tolist()
            if len(self.texts[self.growing[handle]]) + len(more) > self.most_tokens:
                self.full.add(handle)
            if handle not in self.full:
                self.texts[self.growing[handle]] += more
        n = len(handles)
        proposals = Continuations(
            np.zeros((n, window), np.int32),
            np.zeros((n, window), np.float32),
            np.zeros(n, np.int32),
            np.zeros(n, np.int32),
        )
        for i, handle in enumerate(handles.tolist()):
            if handle not in self.full and (asked is None or asked[i]):
                self._proposal(proposals, i, *self.growing[handle], window)
        return proposals

    def halted(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.array([handle in self.full for handle in handles.tolist()], np.bool_)

    def _proposal(self, proposals: Continuations, row: int, prompt: Name, rollout: Name, window: int) -> None:
        context = self.prompts[prompt] + self.texts[prompt, rollout]
        while proposals.counts[row] < window:
            followers = self._followers(prompt, context[-_MATCH:])
            if len(context) < _MATCH or not followers:
                return
            (token, count), place = followers.most_common(1)[0], int(proposals.counts[row])
            proposals.tokens[row, place] = token
            proposals.shares[row, place] = count / sum(followers.values())
            proposals.counts[row] += 1
            proposals.matches[row] = _MATCH
            context.append(token)

    def _followers(self, prompt: Name, last: Sequence[int]) -> Counter[int]:
        found: Counter[int] = Counter()
        for (owner, _), text in self.texts.items():
            whole = self.prompts.get(prompt, []) + text if owner == prompt else []
            for end in range(_MATCH, len(whole)):
                if whole[end - _MATCH : end] == list(last):
                    found[whole[end]] += 1
        return found

    def _fits(self, tokens: Any) -> None:
        if len(tokens) > self.most_tokens:
            raise ValueError("too long")
