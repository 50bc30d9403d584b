"""Draft steps of a model that shares the target's KV cache: one token of each sample a step.

The first step reads the sample's latest token, whose KV the target has not computed yet; each step writes the KV of
what it reads behind the target's, into slots that the scheduler has allocated ahead. That KV is provisional: the
target's next step writes its own over it before anything reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata

from services.generation.engine.noise import SampleNoise
from services.generation.engine.rows import IntArray


class Ask(NamedTuple):
    """A sample to draft for: its tokens so far, prompt included, and how many draft tokens are wanted."""

    sample_id: str
    length: int
    tokens: int


class DraftRows:
    """Samples that are drafted for together. Row i of every array is sample i; `places` are rows of the batch."""

    def __init__(self, runner: Any, asks: Sequence[Ask]) -> None:
        """Args:
        runner: vLLM's model runner, between two steps.
        asks: for each sample, at least one token. Those that the runner's batch does not hold as the
            scheduler sees them, or that have no slot, are left out.
        """
        batch = runner.input_batch
        self._runner = runner
        self._table = batch.block_table[0]
        size: int = self._table.block_size
        found: list[tuple[int, Ask, int]] = []
        for ask in asks:
            place = batch.req_id_to_index.get(ask.sample_id)
            if place is None or int(batch.num_tokens_no_spec[place]) != ask.length:
                continue
            slots = int(self._table.num_blocks_per_row[place]) * size - (ask.length - 1)
            if min(ask.tokens, slots) > 0:
                found.append((place, ask, min(ask.tokens, slots)))
        self.sample_ids = [ask.sample_id for _, ask, _ in found]
        self.places: IntArray = np.array([place for place, _, _ in found], np.int64)
        self.limits: IntArray = np.array([limit for _, _, limit in found], np.int64)
        # Position of the token that the next step reads.
        self.positions: IntArray = np.array([ask.length - 1 for _, ask, _ in found], np.int64)
        # Of drafted tokens the log-probabilities are asked for with which they were drawn.
        own: list[SampleNoise] = [runner._noise_of(sample_id) for sample_id in self.sample_ids]
        self.noise = [replace(noise, processed_logprobs=True) for noise in own]
        params = [runner.requests[sample_id].sampling_params for sample_id in self.sample_ids]
        self.stops = [frozenset(each.stop_token_ids or ()) for each in params]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def latest(self) -> IntArray:
        """Each sample's latest token, [n]."""
        batch = self._runner.input_batch
        tokens: IntArray = batch.token_ids_cpu[self.places, self.positions].astype(np.int64)
        return tokens

    def response_positions(self) -> IntArray:
        """The response position that the first draft token has, [n]."""
        batch = self._runner.input_batch
        found: IntArray = (self.positions + 1 - batch.num_prompt_tokens[self.places]).astype(np.int64)
        return found

    def sampling(self, live: IntArray, drafted: Sequence[Sequence[int]]) -> SamplingMetadata:
        """vLLM's sampling parameters of some samples, with their draft tokens so far as output."""
        whole: SamplingMetadata = self._runner.input_batch.sampling_metadata
        places = self.places[live]

        def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[torch.from_numpy(places).to(tensor.device)]

        chosen: dict[str, Any] = {
            name: part(getattr(whole, name)) for name in ("temperature", "top_p", "top_k")
        }
        if not whole.no_penalties:
            penalties = (
                "prompt_token_ids",
                "frequency_penalties",
                "presence_penalties",
                "repetition_penalties",
            )
            chosen |= {name: part(getattr(whole, name)) for name in penalties}
            chosen["output_token_ids"] = [
                [*whole.output_token_ids[place], *drafted[i]]
                for place, i in zip(places.tolist(), live.tolist(), strict=True)
            ]
        return replace(whole, **chosen)

    @torch.inference_mode()
    def forward(self, model: Any, tokens: IntArray, live: IntArray, steps: int) -> torch.Tensor:
        """Logits after the given token of each live sample, [m, V], in the draft step number `steps`.

        Args:
            model: shares the target's attention layers.
            tokens: what is read, [m].
            live: the samples, [m].
            steps: draft steps before this one.
        """
        runner, device = self._runner, self._runner.device
        positions = self.positions[live] + steps
        table = self._table.get_device_tensor(runner.input_batch.num_reqs)[_on(self.places[live], device)]
        where = _on(positions, device)
        size = self._table.block_size
        blocks = table.gather(1, (where // size).unsqueeze(1)).squeeze(1).to(torch.int64)
        slots = blocks * size + where % size
        metadata = _metadata(positions, table, slots, device)
        per_layer: dict[str, Any] = {}
        per_slot: dict[str, torch.Tensor] = {}
        for group in runner.attn_groups[0]:
            built = group.build_metadata_for_drafting(common_attn_metadata=metadata, draft_index=steps)
            per_layer |= dict.fromkeys(group.layer_names, built)
            per_slot |= dict.fromkeys(group.layer_names, slots)
        with set_forward_context(per_layer, runner.vllm_config, num_tokens=len(live), slot_mapping=per_slot):
            hidden = model(
                input_ids=_on(tokens, device),
                positions=where,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        logits: torch.Tensor = model.compute_logits(hidden)
        return logits


def _metadata(
    positions: IntArray, table: torch.Tensor, slots: torch.Tensor, device: torch.device
) -> CommonAttentionMetadata:
    """Attention metadata of one row for each sample."""
    count = len(positions)
    starts = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.from_numpy((positions + 1).astype(np.int32))
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=int(positions.max()) + 1,
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
        is_prefilling=torch.zeros(count, dtype=torch.bool),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )


def _on(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
