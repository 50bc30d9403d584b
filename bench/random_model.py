"""A model of random weights, as large as a benchmark wants it."""

from __future__ import annotations

from pathlib import Path


def make_random_model(folder: Path, *, hidden: int, layers: int, vocab_size: int, length: int) -> Path:
    """Save a Qwen3 with wide distributions, so that equal tokens mean equal computation.

    `length` is its context in tokens.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
