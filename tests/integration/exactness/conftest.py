"""The engines of this folder, each started once for all tests that ask for it; see `Scenario.cold`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest
from tests.support.engine_host import EngineHost, Outcome, Scenario
from tests.support.models import END_TOKEN, tiny_model
from tests.support.oracle import Oracle, log_softmax

OPTIONS = EngineOptions(
    model="",
    dtype="float32",
    max_num_seqs=64,
    max_model_len=256,
    kv_cache_memory_bytes=64 << 20,
    block_size=32,
)
T1 = Sampling(max_tokens=48)
T06 = Sampling(max_tokens=48, temperature=0.6, top_p=0.9)
# A float32 forward agrees with another one to about 1e-5 here; scores closer than this are a tie.
TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Bench:
    """A running engine and the oracle of its model."""

    host: EngineHost
    oracle: Oracle

    def check(self, requests: tuple[EngineRequest, ...], outcome: Outcome) -> None:
        """Every token is the oracle's, every log-probability within 1e-4 of it."""
        for request in requests:
            response = [*request.prefix, *outcome.tokens[request.sample_id]]
            judged = self.oracle.judge(request, response)
            assert max(judged.gap, default=0) < TIE, (request.sample_id, response, judged.expected)
            wanted = judged.processed if request.sampling.processed_logprobs else judged.raw
            got = outcome.logprobs[request.sample_id]
            assert got == pytest.approx(wanted[len(request.prefix) :], abs=1e-4), request.sample_id

    def check_prompts(self, requests: tuple[EngineRequest, ...], outcome: Outcome) -> None:
        """Every prompt that is asked for is told, within 1e-4 of the oracle; and no other."""
        asked = {r.sample_id for r in requests if r.sampling.prompt_logprobs is not None}
        assert outcome.prompts.keys() == asked
        for request in requests:
            if request.sample_id not in asked:
                continue
            told, prompt = outcome.prompts[request.sample_id], request.prompt
            scores = [log_softmax(row) for row in self.oracle.logits(prompt)[:-1]]
            wanted = [row[token] for row, token in zip(scores, prompt[1:], strict=True)]
            assert told.logprobs == pytest.approx(wanted, abs=1e-4)
            most = request.sampling.prompt_logprobs
            for row, ids, values in zip(scores, told.top_token_ids, told.top_logprobs, strict=True):
                assert len(set(ids.tolist())) == len(values) == most
                assert values == pytest.approx(row[ids], abs=1e-4)
                assert np.sort(row)[::-1][:most] == pytest.approx(values, abs=1e-4)


def requests_of(
    vocab_size: int, sampling: Sampling, count: int = 24, lengths: tuple[int, int] = (3, 40), seed: int = 0
) -> tuple[EngineRequest, ...]:
    """Requests with random prompts, `lengths` tokens long; half of them share the start of their prompt."""
    random = Random(seed)
    common = [random.randrange(2, vocab_size) for _ in range(lengths[1])]
    made = []
    for i in range(count):
        length = random.randrange(*lengths)
        own = [random.randrange(2, vocab_size) for _ in range(length)]
        prompt = tuple([*common[: length // 2], *own][:length] if i % 2 else own)
        made.append(EngineRequest(f"r{i}", prompt, (), sampling, random.getrandbits(64)))
    return tuple(made)


def engine(folder: Path, architecture: str, changes: dict[str, Any], **options: Any) -> Iterator[Bench]:
    """An engine of a tiny model, and its oracle."""
    model = tiny_model(folder / architecture, architecture, **changes)
    with EngineHost(replace(OPTIONS, model=str(model), **options)) as host:
        yield Bench(host, Oracle(model, [END_TOKEN]))


@pytest.fixture(scope="package")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen3 with vLLM's usual settings."""
    yield from engine(tmp_path_factory.mktemp("model"), "qwen3", {})


@pytest.fixture(scope="package")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen2 under pressure: a KV cache too small for the batch, prompts in chunks, no prefix cache."""
    yield from engine(
        tmp_path_factory.mktemp("model"),
        "qwen2",
        {},
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
        max_num_seqs=32,
        # 3 layers x 32 tokens x 2 heads x 32 x (key, value) x 4 bytes a block: 24 blocks.
        kv_cache_memory_bytes=24 * 3 * 32 * 2 * 32 * 2 * 4,
    )


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A small Llama with 11 tokens, which vLLM pads to 64."""
    changes = {"vocab_size": 11, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    yield from engine(
        tmp_path_factory.mktemp("model"),
        "llama",
        changes | heads,
        max_num_seqs=256,
        enable_prefix_caching=True,
    )


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen3 in bfloat16, the precision that models are served in."""
    yield from engine(tmp_path_factory.mktemp("model"), "qwen3", {}, dtype="bfloat16")


def run(bench: Bench, requests: tuple[EngineRequest, ...], **how: Any) -> Outcome:
    """Run requests; `how` are fields of the scenario."""
    return bench.host.run(Scenario(requests, **how))
