"""The same tokens under pressure: Qwen2, preemption, prompts in chunks, no prefix cache."""

from __future__ import annotations

import pytest

from services.platform.sampling import Sampling
from tests.integration.exactness.conftest import T06, T1, Bench, requests_of, run
from tests.support.draft_policies import Drafts

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("sampling", [T1, T06], ids=["T=1", "T=0.6, top-p"])
def test_preemption_and_chunked_prompts_change_no_token(qwen2: Bench, sampling: Sampling) -> None:
    requests = requests_of(qwen2.host.vocab_size, sampling, count=16, lengths=(30, 150), seed=2)
    plain = run(qwen2, requests)
    qwen2.check(requests, plain)
    preemptions = plain.preemptions
    for policy in ("true", "random", "adversarial", "varying", "flipping"):
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
