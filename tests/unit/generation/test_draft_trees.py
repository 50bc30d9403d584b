"""Draft trees: what a tree is, which rows a step with trees emits, and how its branches are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coupled_sampler.reference import coupled_argmax_reference
from services.generation.engine.experiments.trees.attention import BranchLayout
from services.generation.engine.experiments.trees.cpu_attention import plan_of, runs_of
from services.generation.engine.experiments.trees.sampling import sample_refusal, sample_trees, segments_of
from services.generation.engine.experiments.trees.tree import ROOT, DraftTree, chain_length, depths_of
from services.generation.engine.sampling.inputs import SETTINGS_KEY, BatchSettings, SampleSettings
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.types import Verifier
from tests.support.draft_trees import random_tree, walk

VOCAB = 6


def paths_of(tree: DraftTree) -> list[list[int]]:
    """The nodes from the root to each node, it included."""
    found: list[list[int]] = []
    for node, parent in enumerate(tree.parents):
        found.append([*(found[parent] if parent != ROOT else []), node])
    return found


def trees_of(seed: int, count: int) -> list[DraftTree]:
    random = Random(seed)
    truths = [[random.randrange(VOCAB) for _ in range(12)] for _ in range(count)]
    return [random_tree(random, truth, random.randrange(12), VOCAB) for truth in truths]


def step_of(trees: Sequence[DraftTree], positions: Sequence[int]) -> tuple[Rows, dict[int, Sequence[int]]]:
    """The rows of a step, and the parents of the trees that are no chains."""
    cu = np.concatenate(([0], np.cumsum([len(tree.tokens) + 1 for tree in trees])))
    drafts = np.array([token for tree in trees for token in tree.tokens], np.int64)
    branched = {
        i: tree.parents for i, tree in enumerate(trees) if chain_length(tree.parents) < len(tree.parents)
    }
    return Rows(cu, np.array(positions, np.int64), drafts), branched


@pytest.mark.parametrize(
    ("tokens", "parents", "reason"),
    [
        ([1, 2], [-1], "parents: 1 for 2"),
        ([1, 2], [-1, 1], "parents: draft token 1 has the parent 1"),
        ([1, 2], [-1, -2], "parents: draft token 1 has the parent -2"),
        ([1, 2, 3, 2], [-1, 0, 1, 0], "tokens: two children of draft token 0 are 2"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DraftTree(tokens, parents)


@given(st.integers(0, 10**6))
def test_depths_are_lengths_of_paths_and_the_chain_is_what_comes_first(seed: int) -> None:
    (tree,) = trees_of(seed, 1)
    paths = paths_of(tree)
    assert depths_of(tree.parents) == [len(path) for path in paths]
    length = chain_length(tree.parents)
    assert paths[length - 1 : length] == ([list(range(length))] if length else [])
    assert length == len(paths) or paths[length] != list(range(length + 1))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.0, 1.0))
def test_a_step_emits_what_plain_sampling_draws_along_each_tree(
    seed: int, count: int, certain: float
) -> None:
    """Logits depend on the path only, so that plain decoding is known; the noise is the sampler's own."""
    random, trees = Random(seed), trees_of(seed, count)
    positions = [random.randrange(5) for _ in trees]
    seeds = [random.getrandbits(64) for _ in trees]
    temperatures = np.array([random.choice((0.0, 0.5, 1.0)) for _ in trees], np.float32)

    def logits_after(sample: int, tokens: Sequence[int]) -> np.ndarray:
        own = np.random.default_rng([seed, sample, *tokens]).normal(size=VOCAB).astype(np.float32)
        # The nearer to 1, the more often the draft is right.
        tree, node = trees[sample], ROOT
        for token in tokens:
            children = [i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token]
            if not children:
                return own
            node = children[0]
        liked = [tree.tokens[i] for i, p in enumerate(tree.parents) if p == node]
        if liked:
            own[liked[len(liked) // 2]] += np.float32(8 * certain)
        return own

    def drawn(sample: int, tokens: Sequence[int]) -> int:
        (token,) = coupled_argmax_reference(
            logits_after(sample, tokens)[None],
            np.array([seeds[sample]], np.uint64),
            np.array([positions[sample] + len(tokens)]),
            temperatures[sample : sample + 1],
        )
        return int(token)

    wanted = []
    for i, tree in enumerate(trees):
        tokens: list[int] = []
        while True:
            tokens.append(drawn(i, tokens))
            if len(walk(tree, tokens)) < len(tokens):
                break
        wanted.append(tokens)

    rows, branched = step_of(trees, positions)
    logits = np.stack(
        [
            logits_after(i, [tree.tokens[node] for node in path])
            for i, tree in enumerate(trees)
            for path in ([], *paths_of(tree))
        ]
    )
    verified = sample_trees(
        torch.from_numpy(logits),
        segments_of(rows, branched),
        BatchSettings.of(
            [
                SampleSettings(each, temperature=float(heat))
                for each, heat in zip(seeds, temperatures, strict=True)
            ]
        ),
        {},
    )
    assert verified.rows is not None
    assert verified.counts.tolist() == [len(tokens) for tokens in wanted]
    assert verified.tokens[verified.rows].tolist() == [token for tokens in wanted for token in tokens]
    expected = [
        int(rows.cu[i]) + 1 + node
        for i, (tree, tokens) in enumerate(zip(trees, wanted, strict=True))
        for node in (-1, *walk(tree, tokens))
    ]
    assert verified.rows.tolist() == expected


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5))
def test_a_branch_is_laid_out_behind_the_context_that_it_sees(seed: int, count: int, size: int) -> None:
    """Slots are filled with names of tokens as a step does; each query must find its path there, and no more."""
    random, trees = Random(seed), trees_of(seed, count)
    computed = [random.randrange(3 * size) for _ in trees]
    rows, branched = step_of(trees, [0] * count)
    segments = segments_of(rows, branched)
    runs = runs_of(BranchLayout(rows, segments, rows.cu, np.array(computed), branched))
    own_rows = [row for run in runs for row in run.path[-run.own :]]
    assert own_rows == np.flatnonzero(segments.forks[segments.rows.samples] >= 0).tolist()
    if not runs:
        return
    # Blocks in any order; in each slot the name of its token: its position before the step, or its row in it.
    lengths = [before + len(tree.tokens) + 1 for before, tree in zip(computed, trees, strict=True)]
    needed = [-(-length // size) for length in lengths]
    numbers = random.sample(range(sum(needed) + 2), sum(needed))
    table, memory = np.zeros((count, max(needed)), np.int32), np.full((sum(needed) + 2, size), -1, object)
    for i, length in enumerate(lengths):
        for block in range(needed[i]):
            table[i, block] = numbers.pop()
        for at in range(length):
            row = int(rows.cu[i]) + at - computed[i]
            memory[table[i, at // size], at % size] = ("row", row) if at >= computed[i] else ("known", i, at)
    plan = plan_of(runs, table, size)
    copy = memory[plan.sources]
    for token, slot in zip(plan.path.tolist(), plan.slots.tolist(), strict=True):
        copy[slot // size, slot % size] = ("row", token)
    for at, run in enumerate(runs):
        flat = copy[plan.table[at]].reshape(-1)[: plan.lengths[at]].tolist()
        queries = plan.own[plan.starts[at] : plan.starts[at + 1]].tolist()
        for back, row in enumerate(reversed(queries)):
            i = run.place
            root, node = int(rows.cu[i]), row - int(rows.cu[i]) - 1
            path = paths_of(trees[i])[node]
            seen = [("known", i, position) for position in range(computed[i])]
            seen += [("row", root), *(("row", root + 1 + each) for each in path)]
            assert flat[: len(flat) - back] == seen


def test_samples_whose_tokens_depend_on_more_than_their_path_are_refused() -> None:
    plain = {
        "verifier": Verifier.COUPLED, "json_schema": "", "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }  # fmt: skip
    assert sample_refusal({SETTINGS_KEY: plain}) is None
    for changed in (
        {"verifier": Verifier.REJECTION}, {"verifier": Verifier.LENIENT}, {"json_schema": "{}"},
        {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.1},
    ):  # fmt: skip
        assert sample_refusal({SETTINGS_KEY: plain | changed})
    assert sample_refusal({SETTINGS_KEY: plain, "paceline_cached": object()})
    assert sample_refusal({SETTINGS_KEY: plain, "paceline_recorded": object()})
