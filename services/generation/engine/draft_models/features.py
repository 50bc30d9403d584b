"""Store hidden features of the target per token, in blocks of its KV, for the EAGLE-3 head.

They are kept in the engine's KV blocks, as if they were the KV of some further layers of the target. So vLLM
counts their memory before it works out how many blocks there are, and they are there exactly where the target's KV
is: found in the prefix cache with it, moved to another engine with it, dropped, and computed again after a
preemption, with it. A drafter can therefore begin to draft for any sample at any time.

Each rank of a tensor-parallel group keeps its share of them, since all of them have all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from services.generation.engine.draft_models.interface import UnsupportedDrafter


class _FeatureLayer(AttentionLayerBase):
    """Layer that vLLM takes for an attention layer, so that it allocates blocks; never run."""

    def __init__(self, like: Any) -> None:
        self._like = like
        # Of one group with the target's layers, whose metadata is then built once.
        self.num_heads = like.num_heads
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> Any:
        """Return the same as vLLM's attention layer."""
        return self._like.get_attn_backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return the same as vLLM's attention layer."""
        return self._like.get_kv_cache_spec(vllm_config)


class Features:
    """Features by slot of the paged KV; created before the KV cache."""

    def __init__(self, runner: Any, layers: Sequence[int]) -> None:
        """Declare a layer for features to vLLM.

        Args:
            runner: vLLM's model runner, its model loaded.
            layers: whose hidden states, rising; number i is what transformers has in hidden_states[i].

        Raises:
            UnsupportedDrafter: the target does not tell its hidden states, or has several kinds of KV.
        """
        target, config = runner.get_model(), runner.vllm_config
        if not hasattr(target, "set_aux_hidden_state_layers"):
            raise UnsupportedDrafter(f"{type(target).__name__} does not tell its hidden states")
        if config.parallel_config.pipeline_parallel_size != 1:
            raise UnsupportedDrafter("the target's layers are on several devices")
        attention = get_layers_from_vllm_config(config, Attention)
        kinds = {layer.get_kv_cache_spec(config) for layer in attention.values()}
        if len(kinds) != 1:
            raise UnsupportedDrafter("the target has several kinds of KV")
        self.spec: Any = kinds.pop()
        if self.spec.dtype != runner.dtype:
            raise UnsupportedDrafter(f"the KV is {self.spec.dtype}, the hidden states are {runner.dtype}")
        self._ranks = get_tensor_model_parallel_world_size()
        self.width = len(layers) * runner.model_config.get_hidden_size()
        self._share = -(-self.width // self._ranks)
        # Values of one token in the KV of one layer.
        per_layer = self.spec.page_size_bytes // self.spec.block_size // runner.dtype.itemsize
        self._per_layer = per_layer
        like, context = next(iter(attention.values())), config.compilation_config.static_forward_context
        first = runner.model_config.get_total_num_hidden_layers() + 1
        self._layers = {
            f"model.features.{first + i}": _FeatureLayer(like) for i in range(-(-self._share // per_layer))
        }
        context.update(self._layers)
        self._flat: list[torch.Tensor] = []
        target.set_aux_hidden_state_layers(tuple(layers))
        # The target then returns them beside its output.
        runner.use_aux_hidden_state_outputs = True

    def keep(self, states: Sequence[torch.Tensor], count: int) -> None:
        """Store the features of the target's last forward pass; within its forward context.

        Args:
            states: of each layer, [rows, hidden], padded.
            count: rows that are tokens.
        """
        slots = get_forward_context().slot_mapping[next(iter(self._layers))][:count]
        whole = torch.cat([state[:count] for state in states], dim=-1)
        begin = get_tensor_model_parallel_rank() * self._share if self._ranks > 1 else 0
        share = whole[:, begin : begin + self._share]
        for flat, part in zip(self._by_slot(), share.split(self._per_layer, dim=1), strict=False):
            flat[:, : part.shape[1]].index_copy_(0, slots, part)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the features at some slots, [rows, width]."""
        share = torch.cat([flat[slots] for flat in self._by_slot()], dim=1)[:, : self._share]
        if self._ranks > 1:
            share = tensor_model_parallel_all_gather(share.contiguous(), dim=-1)
        return share[:, : self.width]

    def _by_slot(self) -> list[torch.Tensor]:
        """Return the memory of each layer as one row per slot; the rows of a block are contiguous, as its KV is."""
        if not self._flat:
            for layer in self._layers.values():
                cache = layer.kv_cache
                order = sorted(range(cache.ndim), key=lambda axis: (-cache.stride(axis), axis))
                self._flat.append(cache.permute(order).view(-1, self._per_layer))
        return self._flat
