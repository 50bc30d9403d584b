"""Two ranks verify draft trees: each moves the KV of its own heads, and both draw the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.generation.engine.types import EngineOptions
from tests.integration.exactness.conftest import T1, requests_of
from tests.support.draft_policies import Drafts
from tests.support.engine_host import Scenario, run_scenario
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.remote_engine import RemoteEngine

pytestmark = [
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks"),
    pytest.mark.timeout(1500),
    pytest.mark.soak,
]


def test_trees_change_no_token(tmp_path: Path) -> None:
    options = EngineOptions(
        model=str(tiny_model(tmp_path / "model")),
        dtype="float32",
        max_num_seqs=32,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        block_size=32,
        tensor_parallel_size=2,
        trees=True,
    )
    requests = requests_of(VOCAB_SIZE, T1, 12)
    with RemoteEngine(options) as engine:
        plain = engine.run(run_scenario, Scenario(requests))
        for policy in ("trees", "mixed", "forked"):
            found = engine.run(run_scenario, Scenario(requests, Drafts(policy, truth=plain.tokens)))
            assert found.tokens == plain.tokens
            assert found.finishes == plain.finishes
            assert found.accepted > 100
