"""Engines with an EAGLE-3 head, a process each for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from services.contracts.sampling import Sampling
from services.drafter.learning.head import Eagle3Head
from services.generation.engine.types import EAGLE3, Eagle3Options, EngineOptions, EngineRequest, W4Options
from tests.integration.exactness.conftest import requests_of
from tests.support.eagle3 import DraftOracle, head_shape, random_head, save_head
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.quantized_runs import Rolled, Rolling
from tests.support.remote_engine import RemoteEngine

DEPTH = 5
CATCH_UP = 400
LENGTH = 40
T1 = Sampling(max_tokens=LENGTH)
DRAFTING = Rolling(DEPTH, drafter=EAGLE3)
OPTIONS = EngineOptions(
    model="",
    dtype="float32",
    max_num_seqs=32,
    max_model_len=192,
    block_size=32,
    # On CPU it is about what comes between the calls, not about memory.
    sleep_mode=True,
)
# The KV of 3 layers and of the head's, and features of 2 layers, which take the place of 2 more:
# x 32 tokens x 2 heads x 32 x (key, value) x 4 bytes.
BLOCK_BYTES = 6 * 32 * 2 * 32 * 2 * 4
DRAFT_VOCABULARY = 300


@dataclass(frozen=True, slots=True)
class Bench:
    """A running engine, the folder of its model, the head that it was started with, and where others can be put."""

    engine: RemoteEngine
    model: Path
    head: Eagle3Head
    folder: Path
    oracle: DraftOracle

    def check(
        self,
        requests: tuple[EngineRequest, ...],
        found: Rolled,
        *,
        head: Eagle3Head | None = None,
        oracle: DraftOracle | None = None,
        part: slice = slice(None),
        least: int = 20,
    ) -> None:
        """Some drafts of each sample are what the learner's own head would draft, token by token."""
        compared = 0
        for request in requests:
            proposals = found.proposals[request.sample_id][part]
            response = found.tokens[request.sample_id]
            places = [(there, len(tokens)) for there, tokens, _ in proposals]
            expected = (oracle or self.oracle).drafts(head or self.head, request, response, places)
            for (there, tokens, logprobs), (wanted, likely) in zip(proposals, expected, strict=True):
                assert tokens == wanted, (request.sample_id, there)
                assert logprobs == pytest.approx(likely, abs=2e-4), (request.sample_id, there)
                compared += 1
        assert compared >= least


def wishes(sampling: Sampling = T1, count: int = 8, **how: object) -> tuple[EngineRequest, ...]:
    """Requests of the tiny model."""
    return requests_of(VOCAB_SIZE, sampling, count, **how)  # type: ignore[arg-type]


def same(found: Rolled, plain: Rolled) -> None:
    """Nothing that the policy said has changed."""
    assert found.tokens == plain.tokens
    assert found.finishes == plain.finishes
    for sample_id, values in plain.logprobs.items():
        assert found.logprobs[sample_id] == pytest.approx(values, abs=2e-5)


@pytest.fixture(scope="package")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen3 in float32 with a head for part of the vocabulary, the quantized copy, and KV for few long samples."""
    folder = tmp_path_factory.mktemp("eagle3")
    model = tiny_model(folder / "qwen3")
    head = random_head(head_shape(model, draft_vocabulary=DRAFT_VOCABULARY), seed=1)
    options = replace(
        OPTIONS,
        model=str(model),
        kv_cache_memory_bytes=40 * BLOCK_BYTES,
        quantized=W4Options(group=32, most_tokens=3),
        eagle3=Eagle3Options(str(save_head(head, folder, 1).path), DEPTH, CATCH_UP),
    )
    with RemoteEngine(options) as engine:
        yield Bench(engine, model, head, folder, DraftOracle(model))


@pytest.fixture(scope="package")
def sixteen_bits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen2, which has biases, in bfloat16, with a head for the whole vocabulary: vLLM packs its weights there."""
    folder = tmp_path_factory.mktemp("eagle3-bfloat16")
    model = tiny_model(folder / "qwen2", "qwen2")
    head = random_head(head_shape(model), seed=1)
    options = replace(
        OPTIONS,
        model=str(model),
        dtype="bfloat16",
        kv_cache_memory_bytes=100 * BLOCK_BYTES,
        eagle3=Eagle3Options(str(save_head(head, folder, 1).path), DEPTH, CATCH_UP),
    )
    with RemoteEngine(options) as engine:
        yield Bench(engine, model, head, folder, DraftOracle(model))
