"""The index by brute force, and what must hold of its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from kernels.suffix_index import Name, SuffixIndex
from kernels.suffix_index.compiled import layout as at
from kernels.suffix_index.compiled.automaton import find
from kernels.suffix_index.compiled.prediction import longest_match
from kernels.suffix_index.records import IndexedPrompt

PROMPT_WEIGHT = 2.0**-100


def growing_text(index: SuffixIndex, handle: int) -> list[int]:
    """Return the tokens of a growing rollout."""
    return index._arena.text(handle).tolist()


def held(index: SuffixIndex) -> dict[Name, tuple[list[int], dict[Name, tuple[int, list[int]]]]]:
    """What the index holds: the prompts' tokens, and version and tokens of all their rollouts."""
    return {
        name: (
            entry.tokens.tolist(),
            {each: (rollout.version, rollout.tokens.tolist()) for each, rollout in entry.rollouts.items()}
            | {
                each: (index._prompts.growing[handle].version, growing_text(index, handle))
                for each, handle in entry.growing.items()
            },
        )
        for name, entry in index._prompts
    }


def continuations(
    prompt: Sequence[int], rollouts: Sequence[tuple[int, Sequence[int]]], text: Sequence[int], decay: float
) -> tuple[int, dict[int, float]]:
    """Return the longest end of prompt + text that goes on somewhere, and the weight of each token that follows it.

    What goes on within the prompt counts once; a rollout of version v counts decay ** -v.
    """
    whole = [*prompt, *text]
    for length in range(len(whole), 0, -1):
        end = whole[len(whole) - length :]
        following: dict[int, float] = defaultdict(float)
        for version, tokens in [(None, []), *rollouts]:
            source = [*prompt, *tokens]
            first, weight = (0, PROMPT_WEIGHT) if version is None else (len(prompt), decay**-version)
            for place in range(max(first, length), len(source)):
                if source[place - length : place] == end:
                    following[source[place]] += weight
        if following:
            return length, dict(following)
    return 0, {}


def edges_of(arrays: at.Arrays, state: int) -> dict[int, tuple[int, float, int]]:
    """Target, weight and name of each edge of a state, by token."""
    here = arrays.states[state]
    if here["target"] == at.NOWHERE:
        return {}
    found = {int(here["token"]): (int(here["target"]), float(here["weight"]), at.INLINE)}
    if here["block"] != at.NOWHERE:
        start, size = int(here["block"]) >> at.SIZE_BITS, int(here["block"]) & (at.SIZES - 1)
        for row in range(start, start + (1 << size)):
            edge = arrays.edges[row]
            if edge["token"] >= 0:
                assert int(edge["token"]) not in found
                found[int(edge["token"])] = (int(edge["target"]), float(edge["weight"]), row)
    return found


def evidence(index: SuffixIndex, handle: int) -> tuple[int, dict[int, float], float, float]:
    """What the automaton has for a growing rollout: match length, weights by token, total, weight of the best."""
    arrays = index._arena.arrays
    state = int(arrays.cursors["state"][handle & 0xFFFFFFFF])
    state, match = longest_match(arrays.states, state, int(arrays.states["length"][state]))
    if arrays.states["link"][state] == at.NOWHERE:
        return 0, {}, 0.0, 0.0
    edges = edges_of(arrays, state)
    best = int(arrays.states["best"][state])
    weights = {token: weight for token, (_, weight, _) in edges.items()}
    chosen = next(weight for _, weight, name in edges.values() if name == best)
    return int(match), weights, float(arrays.states["total"][state]), chosen


def check_memory(index: SuffixIndex) -> None:
    """No row is lost or used twice, every edge is found, and links lead to shorter states."""
    arrays = index._arena.arrays
    states, scalars = arrays.states, arrays.scalars
    owned: set[int] = set()
    rows: set[int] = set()
    for _, entry in index._prompts:
        if entry.built:
            _check_automaton(arrays, entry, owned, rows)
    assert len(owned) == scalars[at.STATES]
    free = _list(states["link"], int(scalars[at.FREE_STATE]))
    assert len(free) + len(owned) == len(states)
    assert not owned & set(free)
    assert (states["length"][free] == at.FREE).all()
    assert len(rows) == scalars[at.EDGES]
    for size in range(at.SIZES):
        for start in _list(arrays.edges["target"], int(scalars[at.FREE_BLOCKS + size])):
            block = set(range(start, start + (1 << size)))
            assert not rows & block
            rows |= block
    assert rows == set(range(scalars[at.EDGES_END]))
    _check_chunks(index)
    assert np.count_nonzero(arrays.entries) == scalars[at.ENTRIES]


def _check_automaton(arrays: at.Arrays, entry: IndexedPrompt, owned: set[int], rows: set[int]) -> None:
    states, stack = arrays.states, [entry.root]
    assert states["link"][entry.root] == at.NOWHERE
    owned.add(entry.root)
    while stack:
        state = stack.pop()
        here = states[state]
        if state != entry.root:
            assert 0 <= states["length"][here["link"]] < here["length"]
        edges = edges_of(arrays, state)
        for token, (target, _, name) in edges.items():
            assert find(arrays.states, arrays.edges, state, token) == name
            assert states["length"][target] > here["length"]
            if target not in owned:
                owned.add(target)
                stack.append(target)
        if here["block"] != at.NOWHERE:
            start, size = int(here["block"]) >> at.SIZE_BITS, int(here["block"]) & (at.SIZES - 1)
            block = set(range(start, start + (1 << size)))
            assert not rows & block
            rows |= block
        if state != entry.root and edges:
            weights = [weight for _, weight, _ in edges.values()]
            assert np.isclose(here["total"], sum(weights), rtol=1e-4)
            best = next(weight for _, weight, name in edges.values() if name == here["best"])
            assert best == max(weights)


def _check_chunks(index: SuffixIndex) -> None:
    arrays = index._arena.arrays
    used = [
        chunk
        for handle in index._prompts.growing
        for chunk in _list(arrays.chunks["next"], int(arrays.cursors["first"][handle & 0xFFFFFFFF]))
    ]
    free = _list(arrays.chunks["next"], int(arrays.scalars[at.FREE_CHUNK]))
    assert len(used) == arrays.scalars[at.CHUNKS]
    assert sorted(used + free) == list(range(len(arrays.chunks)))


def _list(following: np.ndarray, first: int) -> list[int]:
    found = []
    while first != at.NOWHERE:
        found.append(first)
        first = int(following[first])
        assert len(found) <= len(following)
    return found
