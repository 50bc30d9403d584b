"""A whole engine whose attention is vLLM's Triton backend with ours in it."""

import json
import os
from pathlib import Path

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from services.generation.engine.attention.backend import ShortQueryTritonBackend
from services.generation.engine.core import Engine
from services.generation.engine.types import EngineOptions
from tests.integration.kernels.runs import generate, requests_of

PLAIN = Path(os.environ["PLAIN_TOKENS"])


@pytest.fixture(scope="module")
def plain():
    """What another process generated with vLLM's own attention for CPUs, and from what."""
    return json.loads(PLAIN.read_text())


@pytest.fixture(scope="module")
def engine(plain):
    # vLLM has one backend for CPUs; in its place comes the one that CUDA would have.
    ours = f"{ShortQueryTritonBackend.__module__}.{ShortQueryTritonBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, ours)
    return Engine(EngineOptions(**plain["options"]))


def test_tokens_are_those_of_the_plain_engine(engine, plain, launches):
    requests = requests_of(engine.limits.vocab_size, plain["lengths"], plain["max_tokens"])
    assert generate(engine, requests, plain["tokens"], late=1) == plain["tokens"]
    batches = {tuple(step.cu_queries.diff().tolist()) for step in launches}
    assert any(len(set(batch)) > 2 for batch in batches), (
        "decoding and drafts of several lengths in one launch"
    )
    assert max(max(batch) for batch in batches) > 4
    assert all(step.longest_query <= 16 for step in launches)
