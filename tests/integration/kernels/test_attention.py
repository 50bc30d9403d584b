"""Our attention inside vLLM: in Triton's interpreter here, and on CUDA where there is one."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from kernels.backend import installed
from services.generation.engine.types import EngineOptions
from tests.integration.kernels.runs import generate, requests_of
from tests.support.inner_pytest import run_tests
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.remote_engine import RemoteEngine

FOLDER = Path(__file__).parent / "interpreted"
# One prompt of them is a short query as a whole, and one comes late.
LENGTHS, MAX_TOKENS = (40, 9, 33, 26), 8

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed (extra: kernels)"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine with vLLM's own attention generates."""
    folder = tmp_path_factory.mktemp("plain")
    options = EngineOptions(
        model=str(tiny_model(folder / "model", num_hidden_layers=2)),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=128,
        block_size=32,
        kv_cache_memory_bytes=8 << 20,
    )
    with RemoteEngine(options) as engine:
        found = engine.run(generate, requests_of(VOCAB_SIZE, LENGTHS, MAX_TOKENS))
    known = {"options": asdict(options), "lengths": LENGTHS, "max_tokens": MAX_TOKENS, **found._asdict()}
    (folder / "plain.json").write_text(json.dumps(known))
    return folder / "plain.json"


def test_in_the_interpreter(plain: Path) -> None:
    run_tests(
        [FOLDER],
        KERNEL_TESTS="interpret",
        PLAIN_RUN=str(plain),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_OMP_THREADS_BIND=str(max(os.sched_getaffinity(0))),
    )
