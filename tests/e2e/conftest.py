"""One platform for all tests of a file: two instances of a tiny random model, a gateway, a Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import Client
from services.local import Platform, PlatformConfig

VOCAB = 64


def make_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 whose distributions are wide, so that equal tokens mean equal computation."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def platform(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    config = PlatformConfig(
        model=model,
        instances=2,
        folder=tmp_path_factory.mktemp("platform"),
        instance_options=("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=268435456"),
    )
    with Platform(config) as platform:
        yield platform


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    with platform.client() as client:
        yield client
