"""A whole engine whose attention is vLLM's Triton backend with ours in it, as CUDA would have them."""

import json
import os
from pathlib import Path

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from services.generation.engine.attention_backend import LONGEST_SHORT_QUERY, ShortQueryTritonBackend
from services.generation.engine.core import Engine
from services.generation.engine.experiments.trees.attention import BRANCHES
from services.generation.engine.types import EngineOptions
from services.generation.engine.worker import CoupledCPUWorker
from tests.integration.kernels.runs import generate, generate_trees, requests_of

PLAIN = Path(os.environ["PLAIN_RUN"])


@pytest.fixture(scope="module")
def plain():
    """What another process generated with vLLM's own attention for CPUs, and from what."""
    return json.loads(PLAIN.read_text())


@pytest.fixture(scope="module")
def engine(plain):
    # vLLM has one backend for CPUs; in its place comes the one that CUDA would have.
    ours = f"{ShortQueryTritonBackend.__module__}.{ShortQueryTritonBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, ours)
    with pytest.MonkeyPatch.context() as patched:
        # Its part of the trees is the one for CUDA, too.
        patched.setattr(CoupledCPUWorker, "on_cpu", False)
        yield Engine(EngineOptions(**plain["options"] | {"trees": True}))


@pytest.fixture(scope="module")
def requests(engine, plain):
    return requests_of(engine.limits.vocab_size, plain["lengths"], plain["max_tokens"])


@pytest.fixture
def branched(monkeypatch):
    """Steps with branches by how they were computed, and the tokens whose KV was moved in each."""
    found = {"masked": [], "apart": [], "move": []}

    def spy(name, note):
        real = getattr(BRANCHES, name)

        def noting(*args):
            made = real(*args)
            found[name].append(note(args, made))
            return made

        monkeypatch.setattr(BRANCHES, name, noting)

    spy("masked", lambda args, made: made)
    spy("apart", lambda args, made: (args[0], made[1]))
    spy("move", lambda args, _: len(args[0]))
    return found


def same(found, plain):
    """Check tokens, and that what they were drawn from is the same but for rounding."""
    assert found.tokens == plain["tokens"]
    for sample_id, logprobs in found.logprobs.items():
        assert logprobs == pytest.approx(plain["logprobs"][sample_id], abs=1e-4)


def test_samples_are_those_of_the_plain_engine(engine, requests, plain, launches, branched):
    same(generate(engine, requests, plain["tokens"], late=1), plain)
    batches = {tuple(step.cu_queries.diff().tolist()) for step in launches}
    assert any(len(set(batch)) > 2 for batch in batches), (
        "decoding and drafts of several lengths in one launch"
    )
    assert max(max(batch) for batch in batches) > 4
    assert all(step.longest_query <= LONGEST_SHORT_QUERY for step in launches)
    # An engine that takes trees computes steps without them as any other.
    assert all(step.tree is None for step in launches)
    assert not any(branched.values())


def test_samples_with_trees_are_those_of_the_plain_engine(engine, requests, plain, launches, branched):
    assert engine.form is not None
    found = generate_trees(engine, requests, plain["tokens"], late=1)
    same(found, plain)
    assert found.accepted > len(requests) * plain["max_tokens"] // 3
    # KV of branches is moved, and read in the steps that follow.
    assert sum(branched["move"]) > len(requests)
    assert branched["masked"], "short steps have a mask"
    # Beside a prompt that vLLM's kernel computes, samples with branches are computed again.
    assert branched["apart"]
    for whole, own in branched["apart"]:
        assert whole.longest_query > LONGEST_SHORT_QUERY
        assert 0 < len(own.lengths) < len(whole.lengths)
        assert own.tree is not None
    assert sum(step.tree is not None for step in launches) == len(branched["masked"]) + len(branched["apart"])
