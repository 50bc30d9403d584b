"""Grow a larger model for benchmarks from the tiny model, and tune it on the longer problems.

    python -m examples.tinymath.grow_model --out runs/tinymath-16m

With a million parameters the costs and benefits of drafts are invisible. The grown model has 16 million, and
computes the same function at first (Net2Net, Chen et al. 2016; here with zeros instead of copies): new parts read
from old ones but contribute nothing before training. The same options give the same weights on the same machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.tinymath.make_model import Row, batches, draw_row, save, train

LONG_TRACE = 100
"""Least tokens of a response in tuning; a third of all problems have that many."""
_SMALLER_RATE = 0.25
# Matrices of a layer that write to the residual stream, and that read it.
_WRITERS, _READERS = ("o_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GrownSize:
    """Sizes of a grown model. The size of a head and of the vocabulary do not change.

    Norms are scaled by the square root of the ratio of widths, so with four times the width logits are exactly
    equal.
    """

    hidden: int = 512
    intermediate: int = 768
    layers: int = 8
    heads: int = 16
    key_value_heads: int = 8

    def config(self, old: Qwen3Config) -> Qwen3Config:
        """Return the old configuration with these sizes.

        Raises:
            ValueError: a size would shrink, or heads would share keys and values in groups of another size.
        """
        pairs = {
            "hidden": (old.hidden_size, self.hidden),
            "intermediate": (old.intermediate_size, self.intermediate),
            "layers": (old.num_hidden_layers, self.layers),
            "heads": (old.num_attention_heads, self.heads),
        }
        for name, (before, after) in pairs.items():
            if after < before:
                raise ValueError(f"{name} would shrink from {before} to {after}")
        if self.heads * old.num_key_value_heads != self.key_value_heads * old.num_attention_heads:
            raise ValueError("a head would share its keys and values with more or fewer heads than before")
        changed = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            # It is added to the mean square, which the zeros make smaller.
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / self.hidden,
            "layer_types": None,
        }
        return Qwen3Config(**(old.to_dict() | changed))


def grow(model: Qwen3ForCausalLM, size: GrownSize, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a larger model with the same logits, and with tied embeddings like the old one.

    - New dimensions of the residual stream are zero: embeddings and matrices that write to it are zero there.
      Matrices that read it are random there, so that gradients reach the zeros.
    - New heads and new units of the feed-forward layers are random, and their outputs are ignored.
    - Layers are repeated in place, and repetitions write zero.
    """
    torch.manual_seed(seed)
    config = size.config(model.config)
    made = Qwen3ForCausalLM(config).to(torch.float32)
    old, new = model.state_dict(), made.state_dict()
    shrink = (model.config.hidden_size / size.hidden) ** 0.5
    layers, before = size.layers, model.config.num_hidden_layers
    with torch.no_grad():
        new["model.embed_tokens.weight"].zero_()
        _place(new["model.embed_tokens.weight"], old["model.embed_tokens.weight"])
        _widen_norm(new["model.norm.weight"], old["model.norm.weight"], shrink)
        for place in range(layers):
            source = place * before // layers
            repeated = place > 0 and source == (place - 1) * before // layers
            _grow_layer(_layer(new, place), _layer(old, source), shrink, repeated)
    made.load_state_dict(new)
    return made


def _layer(weights: Weights, place: int) -> dict[str, torch.Tensor]:
    """Return the weights of a layer by their last names: `q_proj`, `input_layernorm`."""
    prefix = f"model.layers.{place}."
    return {name.split(".")[-2]: weight for name, weight in weights.items() if name.startswith(prefix)}


def _grow_layer(new: Weights, old: Weights, shrink: float, repeated: bool) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        _widen_norm(new[name], old[name], shrink)
    for name in ("q_norm", "k_norm"):
        new[name].copy_(old[name])
    for name in _READERS:
        new[name].normal_(std=old[name].std().item())
        # Queries and keys shrink with the constant that their own norms add to the mean square.
        _place(new[name], old[name] * (shrink if name in ("q_proj", "k_proj") else 1.0))
    for name in _WRITERS:
        new[name].zero_()
        if not repeated:
            _place(new[name], old[name])


def _widen_norm(new: torch.Tensor, old: torch.Tensor, shrink: float) -> None:
    """Compensate for the zeros in a norm: they make the mean square smaller, so the rest grows by 1 / `shrink`."""
    new.fill_(old.mean().item() * shrink)
    _place(new, old * shrink)


def _place(new: torch.Tensor, old: torch.Tensor) -> None:
    new[tuple(slice(length) for length in old.shape)] = old


def draw_long_row(rng: Random) -> Row:
    """Draw a training row with a long response."""
    while True:
        row = draw_row(rng)
        if len(row[0]) - row[1] >= LONG_TRACE:
            return row


def main() -> None:
    """Read the options, grow the model, tune it, and save it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    options.add_argument("--out", type=Path, default=Path("runs/tinymath-16m"))
    options.add_argument(
        "--steps", type=int, default=200, help="steps of tuning; with 0 the function is unchanged"
    )
    options.add_argument("--tokens", type=int, default=2048, help="tokens of a step, including padding")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    model = grow(Qwen3ForCausalLM.from_pretrained(given.model, dtype=torch.float32), GrownSize(), given.seed)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    rows = batches(given.seed, given.tokens, draw_long_row)
    save(train(model, rows, given.steps, rate=_SMALLER_RATE), given.out)


if __name__ == "__main__":
    main()
