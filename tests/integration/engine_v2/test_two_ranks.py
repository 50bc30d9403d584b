"""Two ranks of V2 on CPU, each with Triton's interpreter, give the tokens of V1's one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest, Verifier
from tests.integration.exactness.conftest import requests_of
from tests.support.draft_policies import Drafts
from tests.support.engine_host import EngineHost, Outcome, Scenario, run_scenario
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.remote_engine import RemoteEngine

pytestmark = [
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks"),
    # Each rank is a process that imports vLLM by itself.
    pytest.mark.timeout(900),
    pytest.mark.soak,
]


def _lenient(requests: tuple[EngineRequest, ...], then: Outcome) -> tuple[EngineRequest, ...]:
    return tuple(
        replace(
            each,
            verifier=Verifier.LENIENT,
            cached=tuple(then.tokens[each.sample_id]),
            cached_logprobs=tuple(value + 0.1 for value in then.logprobs[each.sample_id]),
        )
        for each in requests
    )


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    options = EngineOptions(
        model=str(tiny_model(tmp_path / "model")),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=128,
        block_size=32,
        kv_cache_memory_bytes=4 << 20,
    )
    plain = requests_of(VOCAB_SIZE, Sampling(max_tokens=16), count=3, lengths=(20, 60), seed=3)
    penalised = tuple(replace(each, sampling=Sampling(max_tokens=16, presence_penalty=0.7)) for each in plain)
    with EngineHost(options) as one:
        truth = one.run(Scenario(plain))
        then = one.run(Scenario(tuple(replace(each, seed=each.seed ^ 1) for each in penalised)))
        lenient = _lenient(penalised, then)
        taken_over = one.run(Scenario(lenient))
    assert 0 < sum(taken_over.reused.values()) < sum(map(len, taken_over.tokens.values()))
    both = replace(options, engine="v2", schedule_ahead=True, tensor_parallel_size=2)
    with RemoteEngine(both) as engine:
        assert engine.run(run_scenario, Scenario(plain)).tokens == truth.tokens
        drafted = engine.run(run_scenario, Scenario(plain, Drafts("varying", truth=truth.tokens)))
        assert drafted.tokens == truth.tokens
        assert drafted.accepted > 10
        followed = engine.run(run_scenario, Scenario(lenient, chunk=4))
        assert (followed.tokens, followed.reused) == (taken_over.tokens, taken_over.reused)
