"""EAGLE-3 heads for tests, and what they must draft, computed without the engine.

The oracle takes the policy's hidden states from transformers and the head from services/drafter/learning, which is
what trains it: whole sequences, a plain causal mask, no KV cache, no pages. So it differs from the engine wherever
the engine would read the wrong feature, token, position, layer or stale KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.coupled_sampler.noise import gumbel
from services.contracts import drafter_checkpoint
from services.contracts.drafter_checkpoint import Checkpoint
from services.drafter.learning.head import Eagle3Head, HeadShape
from services.generation.engine.types import EngineRequest

_DEVIATION = 0.08


def head_shape(
    model: Path, layers: tuple[int, ...] = (1, 2), draft_vocabulary: int | None = None
) -> HeadShape:
    """Return the shape of a head for a tiny model (tests/support/models.py)."""
    config = json.loads((model / "config.json").read_text())
    return HeadShape(
        config["vocab_size"],
        draft_vocabulary or config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        layers,
        config["rms_norm_eps"],
        config.get("rope_theta", 10000.0),
        config["max_position_embeddings"],
    )


def random_head(shape: HeadShape, seed: int, scale: float = 1.0) -> Eagle3Head:
    """Random weights, as those of the tiny models: what a head says differs from row to row."""
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(shape)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * _DEVIATION * scale
    if head.d2t is not None:
        head.set_vocabulary(
            torch.randperm(shape.vocab_size, generator=generator)[: len(head.d2t)].sort().values
        )
    return head


def save_head(head: Eagle3Head, parent: Path, version: int) -> Checkpoint:
    """As a checkpoint."""
    return drafter_checkpoint.save(parent, version, head.shape.config(), head.tensors())


class DraftOracle:
    """What a head drafts for a policy, float32 on one thread, at temperature 1."""

    def __init__(self, model: Path) -> None:
        # Slow to import, and heads alone need it not.
        from transformers import AutoModelForCausalLM

        self._policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def features(self, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """Hidden states of some layers after each token, side by side, [n, layers * h]."""
        with torch.inference_mode():
            found = self._policy(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in layers], dim=-1)

    def drafts(
        self,
        head: Eagle3Head,
        request: EngineRequest,
        response: Sequence[int],
        places: Sequence[tuple[int, int]],
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Draft tokens and the log-probability of each.

        Args:
            head: that drafts.
            request: of the sample; at temperature 1.
            response: of it, whole.
            places: of each draft, response tokens that were there, and its tokens.
        """
        with torch.inference_mode():
            combined = head.combine(self.features([*request.prompt, *response], head.shape.layers))
            for there, count in places:
                known = [*request.prompt, *response[:there]]
                yield self._draft(head, request.seed, there, known, combined[: len(known) - 1], count)

    def _draft(
        self, head: Eagle3Head, seed: int, there: int, tokens: list[int], hidden: torch.Tensor, count: int
    ) -> tuple[list[int], list[float]]:
        embed, drafted, logprobs = self._policy.get_input_embeddings(), list[int](), list[float]()
        for step in range(count):
            out = _rows(head, embed(torch.tensor(tokens[1:] + drafted)), hidden)
            whole = _spread(head, head.logits(out[-1]))
            scores = whole.double().numpy() + gumbel(seed, there + step, len(whole))
            drafted.append(int(scores.argmax()))
            logprobs.append(float(whole.log_softmax(-1)[drafted[-1]]))
            hidden = torch.cat([hidden, out[-1:]])
        return drafted, logprobs


def _rows(head: Eagle3Head, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the head's outputs of all rows, [n, h], each attending to those up to itself."""
    entries = head.enter(embeddings[None], hidden[None], torch.arange(len(hidden)))
    groups = entries.query.shape[1] // entries.key.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (entries.key, entries.value))
    weights = entries.query @ keys.transpose(2, 3) / keys.shape[-1] ** 0.5
    mask = torch.ones(weights.shape[-2:], dtype=torch.bool).tril()
    seen = weights.masked_fill(~mask, -torch.inf).softmax(-1) @ values
    return head.leave(hidden[None], seen)[0]


def _spread(head: Eagle3Head, logits: torch.Tensor) -> torch.Tensor:
    """Over the whole vocabulary, [V]."""
    if head.tokens is None:
        return logits
    whole = torch.full((head.shape.vocab_size,), -torch.inf)
    whole[head.tokens] = logits
    return whole
