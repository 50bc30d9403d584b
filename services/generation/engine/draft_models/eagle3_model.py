"""vLLM's EAGLE-3 head in a worker, beside the target, without vLLM's speculation.

The head wants a speculative configuration to be built from; it gets one of its own, in a copy of the engine's
configuration that shares everything else, so that its attention layer is one more of the engine's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from services.contracts.drafter.checkpoint import layers_of, load
from services.contracts.drafter.eagle3_compatibility import unlike_target
from services.generation.engine.draft_models.features import Features
from services.generation.engine.draft_models.interface import UnsupportedDrafter
from services.generation.engine.types import Eagle3Options


class Eagle3Model:
    """EAGLE-3 head: `fc` of features, one layer, `norm` and `lm_head`; the embedding is the target's."""

    def __init__(self, runner: Any, options: Eagle3Options) -> None:
        """Load the head.

        Args:
            runner: vLLM's model runner, its model loaded and its KV not yet.
            options: the checkpoint.

        Raises:
            CorruptCheckpoint: the checkpoint is none.
            UnsupportedDrafter: it is not of a drafter for this target, or the target can have none.
        """
        config, tensors = load(Path(options.checkpoint))
        if faults := unlike_target(config, _facts(runner)):
            raise UnsupportedDrafter(
                f"{options.checkpoint} is no drafter for this model: {'; '.join(faults)}"
            )
        self.features = Features(runner, layers_of(config))
        spec = SpeculativeConfig(
            method="eagle3",
            model=options.checkpoint,
            num_speculative_tokens=options.most_tokens,
            target_model_config=runner.model_config,
            target_parallel_config=runner.vllm_config.parallel_config,
        )
        self._config = copy.copy(runner.vllm_config)
        self._config.speculative_config = spec
        before = set(get_layers_from_vllm_config(self._config, Attention))
        with set_current_vllm_config(self._config), set_model_tag("eagle3"):
            self._model: Any = get_model(vllm_config=self._config, model_config=spec.draft_model_config)
        self._require_kv_of_target(before)
        # One layer, called with another number of rows each time: compiled graphs would not be worth theirs.
        self._model.model.do_not_compile = True
        inner = self._model.model
        _lend(inner, "embed_tokens", runner.get_model().model.embed_tokens)
        # vLLM has one for all layers that rotate alike.
        attention = inner.layers[0].self_attn
        _lend(attention, "rotary_emb", attention.rotary_emb)
        # As it is loaded: a CPU's kernels pack weights, and then no parameter has them.
        self.nbytes = sum(
            each.numel() * (runner.dtype.itemsize if each.is_floating_point() else each.element_size())
            for name, each in tensors.items()
            if name != "t2d"
        )

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Project features to the input of the layer, [rows, hidden]."""
        hidden: torch.Tensor = self._model.combine_hidden_states(features)
        return hidden

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass within its forward context; returns the inputs of logits and of the next step.

        Args:
            tokens: each the one behind its position.
            positions: of the hidden states.
            hidden: from `combine`, or of an earlier step; all [rows].
        """
        found: tuple[torch.Tensor, torch.Tensor] = self._model(tokens, positions, hidden)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the whole vocabulary, -inf for tokens that the head lacks; [rows, V]."""
        found: torch.Tensor = self._model.compute_logits(hidden)
        return found

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load weights in place."""
        with set_current_vllm_config(self._config):
            reload_weights(self._config, self._model, iter(tensors.items()), None, True)

    def _require_kv_of_target(self, before: set[str]) -> None:
        layers = get_layers_from_vllm_config(self._config, Attention)
        for name, layer in layers.items():
            spec = layer.get_kv_cache_spec(self._config)
            if name not in before and spec != self.features.spec:
                raise UnsupportedDrafter(f"the drafter's KV is {spec}, the target's {self.features.spec}")


def _lend(module: torch.nn.Module, name: str, part: torch.nn.Module) -> None:
    """Let a module use another one that is no part of it: loading its weights spares the target's."""
    delattr(module, name)
    object.__setattr__(module, name, part)


def _facts(runner: Any) -> dict[str, int]:
    """Return the traits of the target with which a draft model must agree."""
    config = runner.model_config
    return {
        "hidden_size": config.get_hidden_size(),
        "vocab_size": config.get_vocab_size(),
        "head_dim": config.get_head_size(),
        "num_key_value_heads": config.get_total_num_kv_heads(),
        "num_hidden_layers": config.get_total_num_hidden_layers(),
    }
