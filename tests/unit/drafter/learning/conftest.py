"""A small random policy on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

VOCABULARY = 48


def write_policy(path: Path, seed: int = 0, **changes: object) -> Path:
    """Return a random Qwen3 of four layers, its weights drawn by `seed`."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        **changes,
    }
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the random policy."""
    return write_policy(tmp_path_factory.mktemp("policy") / "v0")
