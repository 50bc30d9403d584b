"""What is taken over does not change under pressure: Qwen2, preemption, prompts and chunks cut short."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest, Verifier
from tests.integration.exactness.conftest import Bench, requests_of, run
from tests.support.draft_policies import Drafts
from tests.support.lenient_oracle import LenientOracle

pytestmark = pytest.mark.timeout(400)

SAMPLING = Sampling(max_tokens=60, ignore_eos=True)


def _lenient(
    bench: Bench, count: int, lengths: tuple[int, int], spread: float, lenience: float
) -> tuple[EngineRequest, ...]:
    """Requests with rollouts of the same weights, whose cached log-probabilities are off by `spread`."""
    random = Random(3)
    requests = requests_of(bench.host.vocab_size, SAMPLING, count=count, lengths=lengths, seed=2)
    made = run(bench, tuple(replace(r, seed=r.seed ^ 1) for r in requests))
    return tuple(
        replace(
            r,
            verifier=Verifier.LENIENT,
            cached=tuple(made.tokens[r.sample_id]),
            cached_logprobs=tuple(p + random.gauss(0, spread) for p in made.logprobs[r.sample_id]),
            lenience=lenience,
        )
        for r in requests
    )


def test_preemption_and_chunked_prompts_take_over_the_same(qwen2: Bench) -> None:
    requests = _lenient(qwen2, 16, (30, 150), 0.5, math.exp(0.5))
    oracle = LenientOracle(qwen2.oracle)
    plain = run(qwen2, requests)
    for request in requests:
        response = plain.tokens[request.sample_id]
        wanted = oracle.retrace(request, response, plain.reused[request.sample_id])
        assert (response, plain.reused[request.sample_id]) == (wanted.tokens, wanted.reused)
    reused = sum(plain.reused.values())
    assert 0.1 < reused / sum(len(r.cached) for r in requests) < 0.9
    assert plain.preemptions > 0
    preemptions = 0
    for chunk, budget in ((3, 1 << 20), (128, 1 << 20), (128, qwen2.host.row_capacity)):
        found = run(qwen2, requests, chunk=chunk, budget=budget, drafts=Drafts("varying", truth=plain.tokens))
        assert (found.tokens, found.reused) == (plain.tokens, plain.reused), (chunk, budget)
        assert found.drafted > reused / 2
        preemptions += found.preemptions
    assert preemptions > 0


def test_a_chunk_that_is_cut_short_is_counted_as_what_was_verified(qwen2: Bench) -> None:
    """Four samples want 60 rows each of a step that has 64: vLLM cuts one and leaves the others out."""
    requests = _lenient(qwen2, 4, (5, 10), 0.0, math.inf)
    found = run(qwen2, requests, chunk=128)
    assert found.tokens == {r.sample_id: list(r.cached) for r in requests}
    assert found.preemptions == 0
    # Each prompt, then a row for each of the sample's later steps, then its drafts.
    prompts = sum(len(r.prompt) for r in requests)
    assert found.scheduled == prompts + found.outputs - len(requests) + found.drafted
    assert found.drafted == found.accepted
    spread = run(qwen2, requests, chunk=128, budget=qwen2.host.row_capacity)
    assert spread.tokens == found.tokens
    # Of 64 rows 4 are the samples' own: 15 drafts each.
    assert spread.steps == 1 + math.ceil(59 / 16) + 1
    assert spread.outputs == (spread.steps - 1) * len(requests)
