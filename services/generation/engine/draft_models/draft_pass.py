"""Forward pass of a draft model between two steps, on the block tables of the engine's running samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from services.generation.engine.sampling.rows import IntArray


class DraftPass:
    """Rows of a pass: `counts[i]` consecutive ones of sample i, from position `starts[i]`.

    `positions` and `slots` (in the paged KV): [rows] on the device, sample by sample.
    """

    def __init__(self, runner: Any, places: IntArray, starts: IntArray, counts: IntArray) -> None:
        """Lay out a pass.

        Args:
            runner: vLLM's model runner, between two steps.
            places: rows of its batch, [m].
            starts: first positions, [m].
            counts: rows of each sample, at least 1, [m].
        """
        self._runner = runner
        self._starts, self._counts = starts, counts
        table = runner.input_batch.block_table[0]
        device, size = runner.device, table.block_size
        self._table = table.get_device_tensor(runner.input_batch.num_reqs)[on(places, device)]
        owner = np.repeat(np.arange(len(places)), counts)
        first = np.cumsum(counts) - counts
        positions = starts[owner] + np.arange(len(owner)) - first[owner]
        self.positions = on(positions, device)
        blocks = self._table[on(owner, device), self.positions // size].to(torch.int64)
        self.slots = blocks * size + self.positions % size

    @contextmanager
    def context(self, draft_step: int) -> Iterator[None]:
        """Enter vLLM's forward context of the pass, for all attention layers; `draft_step` counts from 0."""
        runner, metadata = self._runner, self._metadata()
        per_layer: dict[str, Any] = {}
        per_slot: dict[str, torch.Tensor] = {}
        for group in runner.attn_groups[0]:
            built = group.build_metadata_for_drafting(common_attn_metadata=metadata, draft_index=draft_step)
            per_layer |= dict.fromkeys(group.layer_names, built)
            per_slot |= dict.fromkeys(group.layer_names, self.slots)
        rows = len(self.slots)
        with set_forward_context(per_layer, runner.vllm_config, num_tokens=rows, slot_mapping=per_slot):
            yield

    def _metadata(self) -> CommonAttentionMetadata:
        samples, device = len(self._counts), self._runner.device
        starts = torch.zeros(samples + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(np.cumsum(self._counts).astype(np.int32))
        ends = self._starts + self._counts
        lengths = torch.from_numpy(ends.astype(np.int32))
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            num_reqs=samples,
            num_actual_tokens=len(self.slots),
            max_query_len=int(self._counts.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._table,
            slot_mapping=self.slots,
            causal=True,
            is_prefilling=torch.zeros(samples, dtype=torch.bool),
            seq_lens_cpu_upper_bound=lengths.clone(),
        )


def on(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return an array on a device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
