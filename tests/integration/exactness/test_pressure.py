"""The same tokens under pressure: Qwen2, preemption, prompts in chunks, no prefix cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.contracts.sampling import Sampling
from tests.integration.exactness.conftest import T06, T1, Bench, requests_of, run
from tests.support.draft_policies import Drafts

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("sampling", "policies"),
    [(T1, ("true", "random", "varying", "flipping")), (T06, ("adversarial", "varying"))],
    ids=["T=1", "T=0.6, top-p"],
)
def test_preemption_and_chunked_prompts_change_no_token(
    qwen2: Bench, sampling: Sampling, policies: tuple[str, ...]
) -> None:
    requests = requests_of(qwen2.host.vocab_size, sampling, count=16, lengths=(30, 150), seed=2)
    plain = run(qwen2, requests)
    qwen2.check(requests, plain)
    preemptions = plain.preemptions
    for policy in policies:
        found = run(qwen2, requests, drafts=Drafts(policy, truth=plain.tokens))
        assert found.tokens == plain.tokens, policy
        assert found.finishes == plain.finishes
        assert found.drafted > 50
        preemptions += found.preemptions
    assert plain.preemptions > 0
    assert preemptions > plain.preemptions


def test_a_prompt_in_chunks_gives_the_tokens_of_a_prompt_in_one_piece(qwen2: Bench) -> None:
    """Prompts of up to three chunks beside decoding samples with drafts; the oracle has no chunks."""
    requests = requests_of(qwen2.host.vocab_size, T1, count=10, lengths=(65, 190), seed=5)
    arrivals = tuple(2 * i for i in range(len(requests)))
    plain = run(qwen2, requests, arrivals=arrivals)
    found = run(qwen2, requests, arrivals=arrivals, drafts=Drafts("true", truth=plain.tokens))
    assert found.tokens == plain.tokens
    qwen2.check(requests, found)


def test_prompts_in_chunks_and_preempted_ones_are_told_whole_and_once(qwen2: Bench) -> None:
    requests = tuple(
        replace(request, sampling=replace(request.sampling, prompt_logprobs=(None, 0, 3)[i % 3]))
        for i, request in enumerate(
            requests_of(qwen2.host.vocab_size, T1, count=16, lengths=(30, 150), seed=2)
        )
    )
    found = run(qwen2, requests)
    assert found.preemptions > 0
    qwen2.check(requests, found)
    qwen2.check_prompts(requests, found)


def test_drafts_that_would_fill_a_step_leave_half_of_it_to_prompts(qwen2: Bench) -> None:
    """Four samples want 17 rows each of a step that has 64, when a prompt of 60 tokens comes."""
    sampling = Sampling(max_tokens=100, ignore_eos=True)
    running = requests_of(qwen2.host.vocab_size, sampling, count=4, lengths=(5, 10))
    late = replace(
        requests_of(qwen2.host.vocab_size, sampling, count=1, lengths=(60, 61), seed=3)[0], sample_id="late"
    )
    requests, arrival = (*running, late), 3
    arrivals = (0, 0, 0, 0, arrival)
    plain = run(qwen2, requests, arrivals=arrivals)
    found = run(qwen2, requests, arrivals=arrivals, drafts=Drafts(window=16, truth=plain.tokens), served=True)
    assert found.tokens == plain.tokens
    assert plain.preemptions == found.preemptions == 0
    assert found.accepted == found.drafted > 300
    assert found.began["late"] == arrival + math.ceil(60 / 32) - 1
    # The others went on meanwhile, and were not done.
    assert all(len(plain.tokens[each.sample_id]) > 17 * (found.began["late"] + 1) for each in running)
