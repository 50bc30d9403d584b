"""Tensor parallelism: two ranks of vLLM's CPU engine do all that one does, token for token."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import (
    EAGLE3,
    QUANTIZED,
    Eagle3Options,
    EngineOptions,
    EngineRequest,
    W4Options,
)
from services.generation.kv_transfer.transfers import KvPart
from services.generation.weights.staging import StagedWeights, read_manifest, stage
from tests.integration.exactness.conftest import T06, T1, TIE, requests_of
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.draft_policies import Drafts
from tests.support.eagle3 import head_shape, random_head, save_head
from tests.support.engine_host import Outcome, Scenario, run_scenario
from tests.support.models import END_TOKEN, VOCAB_SIZE, tiny_model
from tests.support.oracle import Oracle
from tests.support.quantized_runs import Rolled, Rolling, rebuild_quantized, roll
from tests.support.remote_engine import RemoteEngine

pytestmark = [
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks"),
    pytest.mark.timeout(600),
]

BLOCK = 32
TOKENS = 24
SHORT = replace(T1, max_tokens=TOKENS)
WAIT = 60.0
TOKEN = b"t" * 32


@dataclass(frozen=True, slots=True)
class Ranks:
    """An engine of two ranks, and folders of the policy that it starts with and of another one."""

    engine: RemoteEngine
    model: Path
    other: Path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Qwen3 with both draft models, whose key-value heads and feed-forward units are divided between the ranks."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    model, other = tiny_model(folder / "first"), tiny_model(folder / "second", seed=1)
    byte_tokenizer(model, VOCAB_SIZE)
    head = random_head(head_shape(model), seed=1)
    options = EngineOptions(
        model=str(model),
        dtype="float32",
        max_num_seqs=32,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        block_size=BLOCK,
        # What is moved is to travel, not to be found again.
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        quantized=W4Options(group=32, most_tokens=3),
        eagle3=Eagle3Options(str(save_head(head, folder, 1).path), 5, 400),
    )
    with RemoteEngine(options) as engine:
        yield Ranks(engine, model, other)


def check(model: Path, requests: tuple[EngineRequest, ...], tokens: dict[str, list[int]]) -> None:
    """Every token is the one that transformers and the reference of coupled sampling give."""
    oracle = Oracle(model, [END_TOKEN])
    for request in requests:
        judged = oracle.judge(request, tokens[request.sample_id])
        assert max(judged.gap, default=0) < TIE, (request.sample_id, judged.expected)


def wishes(sampling: Sampling = SHORT, count: int = 12) -> tuple[EngineRequest, ...]:
    """Requests of the tiny model."""
    return requests_of(VOCAB_SIZE, sampling, count)


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> Rolled:
    """Those requests without drafts."""
    rolled: Rolled = ranks.engine.run(roll, wishes())
    return rolled


# Each rank follows the grammar and scores the prompt by itself.
JSON = Sampling(
    max_tokens=TOKENS,
    json_schema='{"type": "array", "items": {"type": "integer"}, "minItems": 12}',
    top_logprobs=2,
    prompt_logprobs=1,
)


def test_tokens_are_those_of_plain_decoding(ranks: Ranks) -> None:
    """Of three ways of sampling in one batch."""
    ways = SHORT, replace(T06, max_tokens=TOKENS), JSON
    requests = tuple(replace(each, sampling=ways[i % 3]) for i, each in enumerate(wishes(count=18)))
    plain = ranks.engine.run(run_scenario, Scenario(requests))
    check(ranks.model, requests, plain.tokens)
    assert plain.prompts.keys() == {each.sample_id for each in requests if each.sampling is JSON}
    for request in requests:
        told = plain.top_token_ids[request.sample_id]
        assert len(told) == request.sampling.top_logprobs * len(plain.tokens[request.sample_id])
    for policy in ("true", "random"):
        drafts = Drafts(policy, truth=plain.tokens)
        found: Outcome = ranks.engine.run(run_scenario, Scenario(requests, drafts))
        assert found.drafted > 100
        assert found.tokens == plain.tokens
        assert found.finishes == plain.finishes


@pytest.mark.parametrize("drafter", [QUANTIZED, EAGLE3])
def test_draft_models_draft_on_both_ranks(ranks: Ranks, plain: Rolled, drafter: str) -> None:
    found = ranks.engine.run(roll, wishes(), Rolling(3, drafter=drafter))
    assert found.drafted > 100
    assert found.tokens == plain.tokens
    assert found.finishes == plain.finishes
    assert found.blocks[0] == found.blocks[1]
    if drafter == QUANTIZED:
        # Half of the columns are another rank's: a copy that missed them would hardly ever be right.
        assert found.acceptance > 0.5


def test_both_ranks_take_new_weights(ranks: Ranks, plain: Rolled) -> None:
    requests = wishes()
    served = read_manifest(ranks.model)
    try:
        ranks.engine.run(apply, stage(ranks.other, 2, served))
        found = ranks.engine.run(roll, requests, Rolling(3))
        check(ranks.other, requests, found.tokens)
        assert found.tokens != plain.tokens
        assert found.drafted > 100
        assert found.acceptance > 0.5
    finally:
        ranks.engine.run(apply, stage(ranks.model, 3, served))
    assert ranks.engine.run(roll, requests).tokens == plain.tokens


def test_a_sample_moves_with_the_kv_of_both_ranks(ranks: Ranks) -> None:
    request = replace(wishes(Sampling(max_tokens=60, ignore_eos=True), 2)[1], sample_id="moves")
    stayed = ranks.engine.run(roll, (request,)).tokens["moves"]
    found, scheduled = ranks.engine.run(move, request, 30)
    assert found == stayed
    # The first step after the move computes the last token only.
    assert scheduled == 1


def test_a_lost_rank_ends_the_engine(ranks: Ranks) -> None:
    """The last test: nothing can be done with this engine afterwards."""
    error = ranks.engine.run(lose_a_rank, wishes())
    assert error, "the engine went on without a rank"


# -- in the engine's process ------------------------------------------------------------------------------------


def apply(engine: Any, staged: StagedWeights) -> None:
    """Apply weights as an instance does, and build the quantized copy of them."""
    engine.apply_weights(staged.tensors.items())
    rebuild_quantized(engine)


def move(engine: Any, request: EngineRequest, after: int) -> tuple[list[int], int]:
    """Let a sample leave after so many tokens, and enter the same engine again under another name.

    Returns:
        Its tokens, and how many of them the first step after the move computed.
    """
    migration = engine.migration
    migration.open_ports(1 << 16, 2)
    ports = migration.call_ports("listen", "127.0.0.1", 0, None)
    assert len(set(ports)) == 2
    leaves, enters = replace(request, sample_id="leaves"), f"{request.sample_id}/enters"
    engine.add(leaves)
    tokens = []
    while len(tokens) < after:
        tokens += [token for step in engine.step() for token in step.token_ids]
    exported = migration.pause(migration.export("leaves"))
    arriving = replace(request, sample_id=enters, prefix=tuple(tokens))
    reserved = migration.reserve(arriving, len(request.prompt) + 70)
    assert not set(reserved.blocks) & set(exported.blocks)
    migration.call_ports("expect", "m", TOKEN, reserved.blocks, 0, WAIT)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    migration.call_ports("send", "m", addresses, TOKEN, WAIT, KvPart(0, exported.tokens, exported.blocks))
    sent = _sent(migration)
    received = migration.call_ports("received", "m")
    assert [tokens for tokens, _ in received] == [exported.tokens] * 2
    assert [crc for _, crc in received] == [each.crc for each in sent]
    assert received[0] != received[1], "each rank has the KV of its own heads"
    migration.call_ports("drop", "m")
    migration.enter(enters, [])
    engine.abort(["leaves"])
    migration.call_ports("end", "m")
    scheduled: list[int] = []
    schedule = type(engine._scheduler).schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(engine._scheduler, *args, **kwargs)
        scheduled.append(output.total_num_scheduled_tokens)
        return output

    engine._scheduler.schedule = counted
    while engine.has_work:
        tokens += [token for step in engine.step() for token in step.token_ids]
    del engine._scheduler.schedule
    return tokens, scheduled[0]


def lose_a_rank(engine: Any, requests: tuple[EngineRequest, ...]) -> str:
    """Kill the last rank in the middle of samples; returns the error that the engine then raises, or ""."""
    for request in requests:
        engine.add(replace(request, sample_id=f"{request.sample_id}/lost"))
    engine.step()
    executor = engine._core.model_executor
    # vLLM gives the others nine seconds, in which they look without a break for what the lost one does not send.
    executor._ensure_worker_termination = _end
    executor.workers[-1].proc.kill()
    try:
        while engine.has_work:
            engine.step()
    except Exception as error:
        return repr(error)
    return ""


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.kill()


def _sent(migration: Any) -> list[Any]:
    deadline = time.monotonic() + WAIT
    while True:
        sent = migration.call_ports("sent", "m")
        if all(sent):
            return sent
        assert time.monotonic() < deadline, "the KV was not sent"
