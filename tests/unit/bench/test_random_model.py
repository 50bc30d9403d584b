"""A random mixture of experts is the same every time, and tokens of it wake different experts."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from bench.random_model import make_random_experts  # noqa: E402


def made(folder: Path) -> transformers.Qwen3MoeForCausalLM:
    """Return a mixture of 8 experts."""
    make_random_experts(folder, hidden=64, layers=2, experts=8, vocab_size=64, length=64)
    return transformers.Qwen3MoeForCausalLM.from_pretrained(folder)


def test_the_same_sizes_give_the_same_weights(tmp_path: Path) -> None:
    one, other = (made(tmp_path / name).state_dict() for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_tokens_wake_different_experts(tmp_path: Path) -> None:
    with torch.no_grad():
        scores = made(tmp_path)(input_ids=torch.arange(48)[None], output_router_logits=True).router_logits
    for layer in scores:
        assert set(layer.topk(2).indices.flatten().tolist()) == set(range(8))
