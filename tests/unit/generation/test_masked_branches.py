"""Draft trees by a kernel with a mask: bits, samples that are computed again, and KV of accepted branches."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.short_query_attention import AttentionStep
from kernels.short_query_attention.attend import attend_reference
from kernels.short_query_attention.inputs import ancestor_mask
from services.generation.engine.experiments.trees.attention import (
    BranchLayout,
    MaskedBranches,
    layers_at_once,
)
from services.generation.engine.experiments.trees.sampling import segments_of
from services.generation.engine.experiments.trees.tree import ROOT, chain_length
from services.generation.engine.sampling.rows import Rows
from tests.support.draft_trees import random_tree

VOCAB, BLOCK, HEADS, KV_HEADS, SIZE = 6, 4, 4, 2, 16


def parents_of(random: Random, room: int) -> list[int]:
    truth = [random.randrange(VOCAB) for _ in range(12)]
    return list(random_tree(random, truth, room, VOCAB).parents)


def is_tree(parents: list[int]) -> bool:
    return chain_length(parents) < len(parents)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_a_token_sees_itself_its_ancestors_and_the_root(seed: int, count: int) -> None:
    random = Random(seed)
    drafts = [parents_of(random, random.randrange(16)) for _ in range(count)]
    # As long as a mask has bits for, and with tokens of a prompt, of which none has branches.
    drafts.append([random.randrange(ROOT, place) for place in range(63)])
    drafts.append(list(range(ROOT, random.randrange(62))))
    queries = np.array([len(parents) + 1 for parents in drafts])
    trees = {place: parents for place, parents in enumerate(drafts) if is_tree(parents)}
    mask = ancestor_mask(queries, trees)
    assert mask.dtype == np.int64
    seen = [{bit for bit in range(64) if int(bits) >> bit & 1} for bits in mask]
    expected = list[set[int]]()
    for parents in drafts:
        expected.append({0})
        for place in range(len(parents)):
            own, at = {0}, place
            while at != ROOT:
                own.add(at + 1)
                at = parents[at]
            expected.append(own)
    assert seen == expected


def test_more_tokens_than_bits_are_an_error() -> None:
    with pytest.raises(ValueError, match="65 query tokens"):
        ancestor_mask(np.array([3, 65]), {})


def layout_of(
    random: Random, count: int, longest_prompt: int
) -> tuple[BranchLayout, list[int], dict[int, list[int]]]:
    """Samples of which one at least has branches, prompts among them; the layout, queries and trees."""
    drafts = [parents_of(random, random.randrange(12)) for _ in range(count)]
    place = random.randrange(count)
    drafts[place] = [ROOT, ROOT, 1, *range(2, 2 + random.randrange(3))]
    trees = {i: parents for i, parents in enumerate(drafts) if is_tree(parents)}
    for i in range(count):
        # A prompt has one row of logits, however many query tokens.
        if i not in trees and random.random() < 0.5:
            drafts[i] = []
    queries = [len(parents) + 1 for parents in drafts]
    cu = np.concatenate(([0], np.cumsum(queries)))
    for i, parents in enumerate(drafts):
        if not parents:
            queries[i] = random.randrange(1, longest_prompt + 1)
    rows = Rows(cu, np.zeros(count, np.int64), np.zeros(int(cu[-1]) - count, np.int64))
    computed = np.array([random.randrange(9) for _ in drafts])
    starts = np.concatenate(([0], np.cumsum(queries)))
    return BranchLayout(rows, segments_of(rows, trees), starts, computed, trees), queries, trees


def step_of(layout: BranchLayout, seed: int) -> AttentionStep:
    torch.manual_seed(seed)
    queries, count = np.diff(layout.starts), len(layout.computed)
    lengths = torch.from_numpy(layout.computed + queries)
    columns = -(-int(lengths.max()) // BLOCK)
    cache = torch.randn(count * columns, KV_HEADS, BLOCK, 2 * SIZE)
    keys, values = cache.transpose(1, 2).split(SIZE, dim=-1)
    return AttentionStep(
        query=torch.randn(int(layout.starts[-1]), HEADS + 2, SIZE)[:, :HEADS],
        keys=keys,
        values=values,
        block_table=torch.randperm(count * columns).view(count, columns).to(torch.int32),
        lengths=lengths.to(torch.int32),
        cu_queries=torch.from_numpy(layout.starts).to(torch.int32),
        longest_query=int(queries.max()),
        longest=int(lengths.max()),
        scale=SIZE**-0.5,
    )


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_samples_that_are_computed_apart_get_what_the_whole_step_gives_them(seed: int, count: int) -> None:
    layout, queries, trees = layout_of(Random(seed), count, longest_prompt=16)
    step, branches = step_of(layout, seed), MaskedBranches()
    branches.begin(layout)
    assert branches.active
    whole = branches.masked(step)
    whole.check()
    tokens, apart = branches.apart(step)
    apart.check()
    assert apart.longest_query == max(queries[place] for place in trees)
    expected = [
        token for place in sorted(trees) for token in range(layout.starts[place], layout.starts[place + 1])
    ]
    assert tokens.tolist() == expected
    exact, chains = attend_reference(whole), attend_reference(step)
    torch.testing.assert_close(attend_reference(apart), exact[tokens])
    # The others, prompts among them, see what they saw without trees.
    others = [token for token in range(len(exact)) if token not in expected]
    torch.testing.assert_close(exact[others], chains[others])
    assert not torch.allclose(exact[tokens], chains[tokens])
    branches.computed()
    assert not branches.active


def caches_of(kind: str, layers: int, blocks: int) -> list[torch.Tensor]:
    """Caches [blocks, heads, block, content] as vLLM allocates them, or as nobody does."""
    shape = (KV_HEADS, BLOCK, 2 * SIZE)
    if kind == "layers first":
        return list(torch.randn(layers, blocks, *shape).unbind())
    if kind == "blocks first":
        return list(torch.randn(blocks, layers, *shape).unbind(1))
    if kind == "tokens before heads":
        return [
            cache.transpose(1, 2) for cache in torch.randn(layers, blocks, BLOCK, KV_HEADS, 2 * SIZE).unbind()
        ]
    if kind == "uneven":
        return [torch.randn(layers + 2, blocks, *shape)[layer] for layer in (0, 1, *range(3, layers + 1))]
    return [torch.randn(blocks, *shape) for _ in range(layers)]


KINDS = ("layers first", "blocks first", "tokens before heads", "uneven", "apart")


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 4))
def test_kv_of_accepted_branches_is_moved_in_all_layers(seed: int, kind: str, layers: int) -> None:
    """Also where the slot that one token leaves is the one that another takes."""
    random = Random(seed)
    torch.manual_seed(seed)
    count = random.randrange(2, 20)
    caches = caches_of(kind, layers, blocks=8)
    slots = torch.tensor(random.sample(range(8 * BLOCK), count))
    moved = sorted(random.sample(range(1, count), random.randrange(1, count)))
    # A token moves to the place of one before it, and keeps the order.
    targets = sorted(random.sample(range(moved[-1]), len(moved)))
    pairs = [(a, b) for a, b in zip(moved, targets, strict=True) if b < a]
    before = [cache.clone() for cache in caches]
    layout, *_ = layout_of(random, 2, longest_prompt=1)
    branches = MaskedBranches()
    branches.begin(layout)
    for cache in (*caches, caches[0]):
        # A layer that shares the KV of another one comes with the same cache.
        branches.keep(cache, slots)
    branches.computed()
    branches.move(np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        for token, target in pairs:
            source, slot = int(slots[token]), int(slots[target])
            expected[slot // BLOCK, :, slot % BLOCK] = old[source // BLOCK, :, source % BLOCK]
        assert torch.equal(cache, expected)
    assert not branches.active


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_one_allocation_are_written_at_once(kind: str) -> None:
    caches = caches_of(kind, layers=3, blocks=2)
    views = layers_at_once(caches)
    assert len(views) == (3 if kind in ("uneven", "apart") else 1)
    torch.testing.assert_close(torch.cat([view for view in views]), torch.stack(caches))
    for view in views:
        view.fill_(7)
    assert all((cache == 7).all() for cache in caches)
