"""What the EAGLE-3 head drafts in a real engine: what the learner's own head would, and it changes no token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EAGLE3, EngineRequest, Finish
from tests.integration.eagle3.conftest import CATCH_UP, DEPTH, DRAFTING, LENGTH, T1, Bench, same, wishes
from tests.support import eagle3_runs, quantized_runs
from tests.support.quantized_runs import Rolling, roll

pytestmark = pytest.mark.timeout(400)

OTHERS = {
    "T=0.6, top-p": Sampling(max_tokens=LENGTH, temperature=0.6, top_p=0.9),
    "top-k, min-p": Sampling(max_tokens=LENGTH, top_k=20, min_p=0.02),
    "penalties": Sampling(
        max_tokens=LENGTH, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=20
    ),
    "greedy": Sampling(max_tokens=LENGTH, temperature=0),
}


def test_no_class_was_inspected_in_another_process(bench: Bench) -> None:
    classes = "Qwen3ForCausalLM", "LlamaForCausalLMEagle3", "MixtralForCausalLM"
    assert bench.engine.run(eagle3_runs.imported, *classes) == [True, True, False]


def test_it_drafts_what_the_learner_would(bench: Bench) -> None:
    requests = wishes()
    plain = bench.engine.run(roll, requests)
    found = bench.engine.run(roll, requests, DRAFTING)
    same(found, plain)
    assert plain.drafted == 0 < found.accepted
    # Every draft of every sample, from the first token on.
    bench.check(requests, found, least=100)
    drafted = {token for made in found.proposals.values() for _, tokens, _ in made for token in tokens}
    named = set((bench.head.tokens if bench.head.tokens is not None else range(0)).tolist())
    assert drafted <= named


def test_unlike_samples_that_come_at_any_time_share_draft_steps(bench: Bench) -> None:
    requests = tuple(
        replace(request, sample_id=f"{name}/{request.sample_id}")
        for name, sampling in {"T=1": T1, **OTHERS}.items()
        for request in wishes(sampling, 3)
    )
    plain = bench.engine.run(roll, requests)
    found = bench.engine.run(roll, requests, replace(DRAFTING, arrivals=tuple(range(len(requests)))))
    same(found, plain)
    bench.check(tuple(each for each in requests if each.sample_id.startswith("T=1")), found)


def test_what_was_not_accepted_leaves_nothing_behind(bench: Bench) -> None:
    """Its own drafts are thrown away, and others verified: the rows that it wrote for its own are read no more."""
    requests = wishes(lengths=(20, 60))
    plain = bench.engine.run(roll, requests)
    found = bench.engine.run(roll, requests, replace(DRAFTING, truth=plain.tokens, watch=True))
    same(found, plain)
    assert found.accepted > 100
    bench.check(requests, found)
    # It writes neither the target's KV nor features: those are the first and the last layers that are watched.
    assert (found.written, found.harmed) == (0, 0)


@pytest.mark.parametrize("paused", [(0, 15), (6, 20)])
def test_samples_enter_speculation_at_any_time(bench: Bench, paused: tuple[int, int]) -> None:
    requests = wishes(count=8, lengths=(60, 100))
    plain = bench.engine.run(roll, requests)
    found = bench.engine.run(roll, requests, replace(DRAFTING, paused=paused))
    same(found, plain)
    bench.check(requests, found)
    # They had fallen behind by more than is read before one step: some drafted while others caught up.
    behind = [count for count in found.caught_up if count > 8 * (DEPTH + 1)]
    assert max(behind) <= CATCH_UP
    if paused[0] == 0:
        assert behind[0] == CATCH_UP
        assert len(behind) > 1


def test_the_prefix_cache_has_what_the_head_needs(bench: Bench) -> None:
    requests = wishes(lengths=(70, 120), count=8)
    plain = bench.engine.run(roll, requests)
    # Found in the cache is what was computed while nobody drafted.
    found = bench.engine.run(roll, requests, replace(DRAFTING, cold=False))
    same(found, plain)
    bench.check(requests, found)
    same(bench.engine.run(roll, requests, Rolling(cold=False)), plain)


def test_preemption_loses_neither_tokens_nor_drafts(bench: Bench) -> None:
    requests = wishes(count=16, lengths=(60, 130))
    plain = bench.engine.run(roll, requests)
    found = bench.engine.run(roll, requests, DRAFTING)
    same(found, plain)
    assert found.preemptions > 0
    assert found.blocks[0] == found.blocks[1] == plain.blocks[1]
    bench.check(requests, found, part=slice(None, None, 3))


def test_a_draft_ends_at_a_stop_token_and_at_the_length_limits(bench: Bench) -> None:
    free = wishes(replace(T1, ignore_eos=True), lengths=(120, 160))
    whole = bench.engine.run(roll, free)
    stops = {key: tokens[10] for key, tokens in whole.tokens.items()}
    requests = tuple(
        replace(r, sampling=replace(r.sampling, stop_token_ids=(stops[r.sample_id],))) for r in free
    )
    found = bench.engine.run(roll, requests, DRAFTING)
    for key, tokens in found.tokens.items():
        assert tokens == whole.tokens[key][: whole.tokens[key].index(stops[key]) + 1]
        assert found.finishes[key] is Finish.STOP
        for _, proposed, _ in found.proposals[key]:
            assert stops[key] not in proposed[:-1]
    # A prompt of up to 160 leaves 32 tokens of the model's 192.
    endless = tuple(replace(r, sampling=Sampling(ignore_eos=True)) for r in free)
    plain = bench.engine.run(roll, endless)
    found = bench.engine.run(roll, endless, DRAFTING)
    same(found, plain)
    for request in endless:
        limit = 192 - len(request.prompt)
        assert len(found.tokens[request.sample_id]) == limit
        assert all(there + len(tokens) < limit for there, tokens, _ in found.proposals[request.sample_id])


def test_unlike_drafters_share_an_engine(bench: Bench) -> None:
    requests = wishes(count=12)
    plain = bench.engine.run(roll, requests)
    mixed: tuple[EngineRequest, ...] = tuple(
        replace(request, given=tuple(plain.tokens[request.sample_id])) if i % 2 else request
        for i, request in enumerate(requests)
    )
    found = bench.engine.run(quantized_runs.speculate, mixed, DEPTH)
    assert found.tokens == plain.tokens
    assert found.finishes == plain.finishes
    drafters = [{source for source, _, _ in drafts} for drafts in found.sources.values()]
    assert set().union(*drafters) >= {EAGLE3, "quantized", "reference"}
