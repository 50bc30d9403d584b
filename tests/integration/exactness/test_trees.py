"""Draft trees are verified as chains are: token for token what plain decoding gives, whatever the trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest
from tests.integration.exactness.conftest import T06, T1, Bench, engine, requests_of, run
from tests.support.draft_policies import Drafts
from tests.support.engine_host import Outcome

LONG = Sampling(max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen3 that verifies trees, with a prefix cache, prompts in chunks, and room for a part of the batch only."""
    yield from engine(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        {},
        trees=True,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        # 3 layers x 32 tokens x 2 heads x 32 x (key, value) x 4 bytes a block: 48 blocks.
        kv_cache_memory_bytes=48 * 3 * 32 * 2 * 32 * 2 * 4,
    )


@pytest.fixture(scope="module")
def truth(trees: Bench) -> tuple[tuple[EngineRequest, ...], Outcome]:
    """Samples over several blocks, half of them hot and half with masks, and what plain decoding gives."""
    random = requests_of(trees.host.vocab_size, LONG)
    requests = tuple(
        replace(each, sampling=replace(T06, max_tokens=70, top_logprobs=2)) if i % 3 == 0 else each
        for i, each in enumerate(random)
    )
    plain = run(trees, requests)
    trees.check(requests, plain)
    return requests, plain


def same(one: Outcome, other: Outcome) -> None:
    assert one.tokens == other.tokens
    assert one.finishes == other.finishes
    assert one.top_token_ids == other.top_token_ids
    for sample_id, logprobs in one.logprobs.items():
        assert logprobs == pytest.approx(other.logprobs[sample_id], abs=1e-4)


@pytest.mark.parametrize(("policy", "seed"), [("trees", 0), ("trees", 1), ("mixed", 2)])
def test_random_trees_change_no_token(
    trees: Bench, truth: tuple[tuple[EngineRequest, ...], Outcome], policy: str, seed: int
) -> None:
    """Under preemption, across blocks, in batches with chains, prompts and plain samples."""
    requests, plain = truth
    arrivals = tuple(i // 4 for i in range(len(requests)))
    found = run(trees, requests, drafts=Drafts(policy, truth=plain.tokens, seed=seed), arrivals=arrivals)
    same(found, plain)
    assert found.preemptions, "the cache has room for all samples"
    assert found.accepted > sum(map(len, plain.tokens.values())) // 4
    # A step gives a sample what it accepts and one token more, and the end of a response cuts some off.
    missing = sum(map(len, found.tokens.values())) - found.accepted
    assert 0 <= missing <= found.outputs


def test_a_right_branch_saves_what_a_right_chain_saves(
    trees: Bench, truth: tuple[tuple[EngineRequest, ...], Outcome]
) -> None:
    requests, plain = truth
    chains = run(trees, requests, drafts=Drafts("unforked", 5, truth=plain.tokens))
    forked = run(trees, requests, drafts=Drafts("forked", 5, truth=plain.tokens))
    same(forked, plain)
    assert forked.accepted == chains.accepted
    assert forked.outputs == chains.outputs < plain.outputs / 4


def test_kv_of_accepted_branches_serves_those_who_find_it_in_the_prefix_cache(
    trees: Bench, truth: tuple[tuple[EngineRequest, ...], Outcome]
) -> None:
    requests, plain = (truth[0][:4], truth[1])
    first = run(trees, requests, drafts=Drafts("forked", 4, truth=plain.tokens))
    assert first.tokens == {each.sample_id: plain.tokens[each.sample_id] for each in requests}
    longer = tuple(
        EngineRequest(f"n{i}", (*each.prompt, *first.tokens[each.sample_id][:70]), (), T1, 7 + i)
        for i, each in enumerate(requests)
    )
    found = run(trees, longer, cold=False)
    assert all(found.cached[each.sample_id] >= 64 for each in longer)
    trees.check(longer, found)


def test_samples_that_depend_on_more_than_their_path_get_the_chain(trees: Bench) -> None:
    penalised = replace(T1, frequency_penalty=0.7, repetition_penalty=1.2)
    requests = tuple(
        replace(each, sampling=penalised if i % 2 else T1)
        for i, each in enumerate(requests_of(trees.host.vocab_size, T1, count=8))
    )
    plain = run(trees, requests)
    trees.check(requests, plain)
    found = run(trees, requests, drafts=Drafts("trees", truth=plain.tokens, seed=3))
    same(found, plain)
    odd = tuple(each for i, each in enumerate(requests) if i % 2)
    chains = run(trees, odd, drafts=Drafts("forked", 4, truth=plain.tokens))
    assert chains.tokens == {each.sample_id: plain.tokens[each.sample_id] for each in odd}
    assert not chains.accepted, "a branch was verified"


def test_an_instance_drafts_branches_where_its_texts_differ(
    trees: Bench, truth: tuple[tuple[EngineRequest, ...], Outcome]
) -> None:
    """Suffix index, planner, loop and engine together: where most texts are wrong the branch is right."""
    # Few, so that a step has rows for all that is worth it.
    requests, plain = truth[0][:6], truth[1].tokens
    asked = Drafts(window=24, truth=plain)
    chains = run(trees, requests, drafts=asked, served=True, branches=0)
    forked = run(trees, requests, drafts=asked, served=True, branches=3)
    assert chains.tokens == forked.tokens == {each.sample_id: plain[each.sample_id] for each in requests}
    assert forked.outputs < 0.8 * chains.outputs
