"""Create models with random weights that an engine draws on its own device; only a config file is written.

vLLM's own dummy weights are within a thousandth of zero, norms included, and give nearly flat logits. Tokens would
then not distinguish a wrong computation from a right one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOAD_FORMAT = "paceline_random"
_SPREAD = 1.5
"""Standard deviation of a matrix's entries, times the square root of its columns."""
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_cache": True,
}


def _shape(
    hidden: int,
    inner: int,
    heads: int,
    layers: int,
    *,
    tied: bool,
    kv_heads: int = 8,
    vocabulary: int = 151_936,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40_960,
        "dtype": "bfloat16",
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "q17": _shape(2048, 6144, 16, 28, tied=True),
    "q8": _shape(4096, 12_288, 32, 36, tied=False),
    "tiny": {
        **_shape(128, 256, 2, 2, tied=True, kv_heads=1, vocabulary=512),
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "dtype": "float32",
    },
}
"""Configs by name: Qwen3-1.7B, Qwen3-8B, and a tiny model for a CPU."""
PREFILL = {"q17": 60_000, "q8": 20_000, "tiny": 10_000}
"""Estimated prefill speed in tokens a second; other models use the value of q8."""


def model_folder(given: str, made: Path) -> tuple[Path, str]:
    """Return the folder of a model, and the load format that vLLM is to use.

    Args:
        given: a name in `SHAPES`, or a folder with a config.json. If the folder also has weights, they are loaded,
            otherwise random ones are drawn.
        made: folder for the config of a named shape.

    Raises:
        ValueError: it is neither.
    """
    if given in SHAPES:
        made.mkdir(parents=True, exist_ok=True)
        (made / "config.json").write_text(json.dumps({**_QWEN3, **SHAPES[given]}, indent=1) + "\n")
        return made, LOAD_FORMAT
    folder = Path(given)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {given}: must be a folder with a config.json, or one of {', '.join(SHAPES)}"
        )
    return folder, "auto" if any(folder.glob("*.safetensors")) else LOAD_FORMAT


def register_random_weights() -> None:
    """Register the load format of random weights in this process's vLLM. Imports vLLM."""
    import torch
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    class RandomWeights(BaseModelLoader):
        """Draw every matrix from a fixed seed per matrix, equal in all engines. Norms are 1, biases 0."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing, because there is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill the parameters in place."""
            for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
                fill(name, parameter.data, seed)
            if hasattr(model, "has_own_lm_head"):
                # Otherwise vLLM would use the model's, which is four times as wide.
                model.has_own_lm_head = True  # type: ignore[assignment]

    def fill(name: str, values: torch.Tensor, seed: int) -> None:
        if not values.is_floating_point():
            return
        if values.ndim < 2:
            values.fill_(0 if name.endswith("bias") else 1)
            return
        generator = torch.Generator(device=values.device).manual_seed(seed)
        values.normal_(0, _SPREAD * values.shape[-1] ** -0.5, generator=generator)

    register_model_loader(LOAD_FORMAT)(RandomWeights)


def random_head(target: Mapping[str, Any], folder: Path) -> Path:
    """Return a checkpoint of an EAGLE-3 head with random weights for a model of this config; reuse one that fits.

    It costs as much as a trained head, and almost none of its drafts are accepted. It has the first 32,000 tokens
    of the vocabulary.
    """
    import torch

    from services.contracts.drafter_checkpoint import SIZES, folder_of, read_config, save, shapes
    from services.drafter.learning.head import HeadShape

    layers, vocabulary = target["num_hidden_layers"], target["vocab_size"]
    rows = min(32_000, vocabulary)
    sizes = {name: target[name] for name in SIZES if name != "draft_vocab_size"}
    config = HeadShape(
        **sizes,
        draft_vocab_size=rows,
        layers=tuple(sorted({max(1, min(layer, layers - 1)) for layer in (2, layers // 2, layers - 3)})),
        eps=1e-6,
        rope_theta=1e6,
        max_positions=target["max_position_embeddings"],
    ).config()
    made = folder_of(folder, 1)
    if made.is_dir() and read_config(made) == config:
        return made
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config).items():
        matrix = len(shape) == 2
        tensors[name] = _SPREAD * torch.randn(shape) * shape[1] ** -0.5 if matrix else torch.ones(shape)
    if rows < vocabulary:
        tensors["d2t"] = torch.zeros(rows, dtype=torch.int64)
        tensors["t2d"] = torch.arange(vocabulary) < rows
    dtype = getattr(torch, target["dtype"])
    floats = {name: each.to(dtype) for name, each in tensors.items() if each.is_floating_point()}
    return save(folder, 1, config, tensors | floats).path
