"""Keep recurrent states exact when a step refuses drafts: copy them before the step, and take the copy back.

A recurrent layer keeps one state of all tokens so far. A step advances it over all of its drafts, and vLLM's
kernels can stop at an accepted one only with a state for each draft token (100 MB each on an 8B Nemotron-H).
Here a sample has two states. Before a step that verifies drafts its state is copied; if a draft is refused, the
copy is taken back, and the sample's next step computes the accepted tokens again before its new drafts. With
coupled drafts refusals are rare, so a drafted step costs one copy: as much memory traffic as the layer's own read
and write. Decision 0016 has the alternatives.

    states = recurrent_states(kv_cache_config, layers, tables, device)
    states.keep(tables, sample_ids, places)  # before the forward pass of every step, for samples with drafts
    states.take_back(tables, sample_ids, places)  # after verification, for samples with a refused draft
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, iter_layer_specs
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.mamba_utils import batch_memcpy

IntArray = NDArray[np.int64]
# One program of the device copies one piece. A state of a layer is some megabytes: for few samples it is copied in
# many pieces, so that the whole device copies; for many in few, so that the host lists few.
_PIECES = 4096
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 1 << 30


def with_spare_states(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the KV cache specs of all layers with room for a copy of each sample's recurrent state.

    vLLM's "speculative blocks" are further blocks of a sample, behind the one that its kernels use.
    """
    return {
        name: replace(spec, num_speculative_blocks=1) if isinstance(spec, MambaSpec) else spec
        for name, spec in specs.items()
    }


class StateTable(BlockTable):
    """vLLM's block table of a recurrent layer: its kernels see the states, and not their copies."""

    def get_device_tensor(self, num_reqs: int) -> torch.Tensor:
        """Return the blocks of the states, [num_reqs, 1]; kernels for CPU need them without gaps."""
        states = super().get_device_tensor(num_reqs)[:, :1]
        # `contiguous` would keep the stride of a single row.
        return states.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class _Group:
    """Memory that holds the states of a group's layers."""

    index: int
    """Place of the group in vLLM's configuration."""
    memory: IntArray
    """Address of the state in block 0, bytes from a block to the next, and bytes of a state; [tensors, 3]."""

    def copies(self, blocks: IntArray, source: int, target: int, most_bytes: int) -> IntArray:
        """Return (source address, target address, size) of each piece to copy, [pieces, 3].

        Args:
            blocks: block table of the samples, [samples, 2].
            source: column of the blocks to copy.
            target: column of the blocks to write.
            most_bytes: largest piece, in bytes.
        """
        pieces = pieces_of(self.memory[:, 2], most_bytes)
        starts, strides = self.memory[pieces[:, 0], 0] + pieces[:, 1], self.memory[pieces[:, 0], 1]
        addresses = starts + blocks[:, :, None] * strides
        sizes = np.broadcast_to(pieces[:, 2], addresses[:, source].shape)
        return np.stack((addresses[:, source], addresses[:, target], sizes), axis=-1).reshape(-1, 3)


def pieces_of(sizes: IntArray, most_bytes: int) -> IntArray:
    """Divide tensors of `sizes` bytes into pieces: (index of the tensor, offset, size) of each, [pieces, 3]."""
    counts = -(-sizes // most_bytes)
    index = np.repeat(np.arange(len(sizes)), counts)
    offsets = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * most_bytes
    return np.stack((index, offsets, np.minimum(most_bytes, sizes[index] - offsets)), axis=-1)


@dataclass(slots=True)
class RecurrentStates:
    """States of the samples of a batch, and their copies.

    The block table of a group has two columns: the block of the state, and the one of its copy.
    """

    device: torch.device
    groups: Sequence[_Group]
    # Samples whose copy is their state, because the last step took it back.
    _equal: frozenset[str] = field(default=frozenset())

    def keep(self, tables: Sequence[Any], sample_ids: Sequence[str], places: Sequence[int]) -> None:
        """Copy the states of the samples at `places` of the batch. Call it once before every step.

        Args:
            tables: vLLM's block table of each group of KV caches.
            sample_ids: samples of the batch.
            places: places in the batch of the samples that verify drafts.
        """
        self._copy(tables, [place for place in places if sample_ids[place] not in self._equal], 0, 1)
        self._equal = frozenset()

    def take_back(self, tables: Sequence[Any], sample_ids: Sequence[str], places: Sequence[int]) -> None:
        """Replace the states of the samples at `places` of the batch by their copies."""
        self._copy(tables, places, 1, 0)
        self._equal = frozenset(sample_ids[place] for place in places)

    def _copy(self, tables: Sequence[Any], places: Sequence[int], source: int, target: int) -> None:
        """Copy blocks from one column of the block tables to the other, all layers in one launch."""
        if not places:
            return
        state_bytes = sum(int(group.memory[:, 2].sum()) for group in self.groups)
        most_bytes = min(max(state_bytes * len(places) // _PIECES, _LEAST_BYTES), _MOST_BYTES)
        copies = np.concatenate(
            [
                group.copies(
                    tables[group.index].block_table.np[list(places)].astype(np.int64),
                    source,
                    target,
                    most_bytes,
                )
                for group in self.groups
            ]
        )
        sources, targets, sizes = torch.from_numpy(copies.T.copy())
        if self.device.type != "cpu":
            sources, targets, sizes = (
                each.pin_memory().to(self.device, non_blocking=True) for each in (sources, targets, sizes)
            )
        batch_memcpy(sources, targets, sizes.to(torch.int32))


def recurrent_states(
    config: Any, layers: Mapping[str, Any], tables: Sequence[Any], device: torch.device
) -> RecurrentStates | None:
    """Return the states of an engine whose samples have room for copies of them; None if they have none.

    Args:
        config: vLLM's configuration of its KV caches, which are allocated.
        layers: layers of the model by name.
        tables: vLLM's block table of each group of KV caches. Copies are hidden from the kernels.
        device: device of the caches.
    """
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        # A group of layers of several sizes has a spec for each of its layers, all of one kind.
        specs = iter_layer_specs(group.kv_cache_spec)
        if any(isinstance(spec, MambaSpec) and spec.num_speculative_blocks for spec in specs):
            states = [state for name in group.layer_names for state in layers[name].kv_cache]
            groups.append(_Group(index, _memory(states)))
            tables[index].__class__ = StateTable
    return RecurrentStates(device, groups) if groups else None


def _memory(states: Iterable[torch.Tensor]) -> IntArray:
    found = []
    for state in states:
        if not state[0].is_contiguous():
            raise ValueError("the state of a block is not contiguous")
        found.append((state.data_ptr(), state.stride(0) * state.itemsize, state[0].numel() * state.itemsize))
    return np.array(found, np.int64)
