"""Branches of continuations: what else followed, how likely it is, and how it goes on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.suffix_index import SuffixIndex
from kernels.suffix_index.records import Continuations


def index_of(texts: Sequence[Sequence[int]], **options: float) -> SuffixIndex:
    index = SuffixIndex(max_tokens=100_000, **options)  # type: ignore[arg-type]
    index.put_prompt("p", [1, 2])
    for number, text in enumerate(texts):
        index.insert("p", number, 0, np.array(text, np.int32))
    return index


def ask(
    index: SuffixIndex, handle: int, tokens: Sequence[int], window: int = 4, branches: int = 2
) -> Continuations:
    cu = np.array([0, len(tokens)])
    return index.step(np.array([handle]), np.array(tokens, np.int32), cu, window, branches)


def trees_of(found: Continuations) -> list[list[tuple[int, int]]]:
    """(parent, token) of each sample's tokens, those of the chain first; a parent by its place in this list."""
    assert found.branches is not None
    window, trees = found.tokens.shape[1], []
    for i, count in enumerate(found.counts.tolist()):
        tree = [(place - 1, int(found.tokens[i, place])) for place in range(count)]
        there = np.flatnonzero(found.branches.shares[i] > 0)
        places = {window + int(node): count + k for k, node in enumerate(there)}
        for node in there.tolist():
            parent = int(found.branches.parents[i, node])
            assert parent < count or parent >= window
            tree.append((places.get(parent, parent), int(found.branches.tokens[i, node])))
        trees.append(tree)
    return trees


def test_what_followed_less_often_is_a_branch_with_what_came_then() -> None:
    often, seldom = [9, 10, 11, 12, 13], [9, 10, 21, 22, 23]
    index = index_of([often, often, often, seldom, seldom])
    handle = index.open("p", "mine", 0)
    (tree,) = trees_of(ask(index, handle, [9, 10], window=3, branches=1))
    assert tree == [(-1, 11), (0, 12), (1, 13), (-1, 21), (3, 22), (4, 23)]
    # One place later there is nothing else that could come.
    (tree,) = trees_of(ask(index, handle, [11], window=2, branches=1))
    assert tree[:2] == [(-1, 12), (0, 13)]
    assert all(token not in (21, 22, 23) for _, token in tree)


def test_a_branch_may_fork_off_within_the_chain() -> None:
    often, seldom = [9, 10, 11, 12, 13], [9, 10, 11, 32, 33]
    index = index_of([often, often, often, seldom, seldom])
    handle = index.open("p", "mine", 0)
    (tree,) = trees_of(ask(index, handle, [9, 10], window=3, branches=1))
    assert tree[:3] == [(-1, 11), (0, 12), (1, 13)]
    assert tree[3:5] == [(0, 32), (3, 33)]


tokens = st.lists(st.integers(3, 7), min_size=1, max_size=30)


@settings(deadline=None)
@given(st.lists(tokens, max_size=5), st.lists(tokens, min_size=1, max_size=4), st.integers(1, 4))
def test_branches_are_trees_and_leave_the_chain_as_it_is(
    texts: list[list[int]], steps: list[list[int]], branches: int
) -> None:
    without, index = index_of(texts, floor=0.01), index_of(texts, floor=0.01)
    handles = [each.open("p", "mine", 0) for each in (without, index)]
    for own in steps:
        plain = ask(without, handles[0], own, branches=0)
        found = ask(index, handles[1], own, branches=branches)
        assert plain.branches is None
        for name in ("tokens", "shares", "counts", "matches"):
            assert getattr(plain, name).tolist() == getattr(found, name).tolist()
        (tree,) = trees_of(found)
        assert len(set(tree)) == len(tree), "two children of one parent are the same token"
        assert all(parent < place for place, (parent, _) in enumerate(tree))
        forks = [place for place, (parent, _) in enumerate(tree) if parent != place - 1]
        assert found.branches is not None
        assert len(forks) <= branches
        shares = found.branches.shares
        assert ((shares >= 0) & (shares <= 1)).all()


def test_chances_of_branches_are_learned_from_what_comes() -> None:
    """After 9 10 comes 11 twice as often as 21, here and in the other texts: a third of the time."""
    random = np.random.default_rng(5)

    def text(length: int) -> list[int]:
        made: list[int] = []
        for _ in range(length):
            made += [9, 10, 11 if random.random() < 2 / 3 else 21]
        return made

    index = index_of([text(40) for _ in range(3)])
    handle = index.open("p", "mine", 0)
    said, came = list[float](), list[bool]()
    for _ in range(300):
        found = ask(index, handle, [9, 10], window=1, branches=1)
        token = 11 if random.random() < 2 / 3 else 21
        assert found.branches is not None
        share = float(found.branches.shares[0, 0])
        if share:
            said.append(share)
            came.append(int(found.branches.tokens[0, 0]) == token)
        ask(index, handle, [token], window=1, branches=1)
    assert len(said) > 200
    assert np.mean(said[100:]) == pytest.approx(np.mean(came[100:]), abs=0.1)


def test_a_negative_number_of_branches_is_refused() -> None:
    index = index_of([])
    with pytest.raises(ValueError, match="branches must be 0 or more"):
        ask(index, index.open("p", "mine", 0), [3], branches=-1)
