"""Draft with a model for the running samples: select them, run its forward passes, and draw with their noise.

A forward pass runs between two steps, on the block tables of the engine's samples. It writes the KV of what it
reads behind the target's, into slots that the scheduler has allocated ahead. That KV is provisional: the target's
next step overwrites it before anything reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from services.generation.engine.sampling.inputs import DrawSettings, SampleNoise
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.sampling.sampler import sample
from services.generation.engine.types import Ask, ModelProposal, Verifier


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


Forward = Callable[[IntArray, IntArray, int], torch.Tensor]
"""Logits, [m, V], after the latest token of each live sample, [m], which are the second argument, [m]; in the draft
step of this number, from 0."""


class DraftRows:
    """Samples of one drafting round. Row i of every array is sample i; `places` are rows of the batch.

    One whose drafts are verified by rejection is left out: its noise is no help to a draft.
    """

    def __init__(self, runner: Any, asks: Sequence[Ask]) -> None:
        """Select the samples that can be drafted for.

        Args:
            runner: vLLM's model runner, between two steps.
            asks: at least one token per sample. Samples that the runner's batch does not hold as the scheduler
                sees them, or without a free slot, are left out.
        """
        batch = runner.input_batch
        self._runner = runner
        table = batch.block_table[0]
        found: list[tuple[int, Ask, int]] = []
        for ask in asks:
            place = batch.req_id_to_index.get(ask.sample_id)
            if place is None or int(batch.num_tokens_no_spec[place]) != ask.length:
                continue
            if runner._noise_of(ask.sample_id).verifier is Verifier.REJECTION:
                continue
            slots = int(table.num_blocks_per_row[place]) * table.block_size - (ask.length - 1)
            if min(ask.tokens, slots) > 0:
                found.append((place, ask, min(ask.tokens, slots)))
        self.asks = [ask for _, ask, _ in found]
        self.places: IntArray = np.array([place for place, _, _ in found], np.int64)
        self.limits: IntArray = np.array([limit for _, _, limit in found], np.int64)
        # Position of the sample's latest token, whose KV the target has not computed yet.
        self.positions: IntArray = np.array([ask.length - 1 for _, ask, _ in found], np.int64)
        # Of drafted tokens the log-probabilities are asked for with which they were drawn.
        own: list[SampleNoise] = [runner._noise_of(ask.sample_id) for ask in self.asks]
        self._noise = [
            replace(noise, processed_logprobs=True, top_logprobs=0, json_schema="") for noise in own
        ]
        params = [runner.requests[ask.sample_id].sampling_params for ask in self.asks]
        self._stops = [frozenset(each.stop_token_ids or ()) for each in params]

    def __len__(self) -> int:
        return len(self.asks)

    def tokens_at(self, places: IntArray, positions: IntArray) -> IntArray:
        """Return the tokens of rows of the batch at some positions, [m]."""
        tokens: IntArray = self._runner.input_batch.token_ids_cpu[places, positions].astype(np.int64)
        return tokens

    def draft(self, live: IntArray, forward: Forward) -> dict[str, ModelProposal]:
        """Draft for the `live` samples, one token each per draft step, up to their limits; returned by sample id.

        A draft ends at a stop token, and where nothing can be drawn: the target finds out for itself.
        """
        made = [ModelProposal([], []) for _ in self.asks]
        drafted = [proposal.tokens for proposal in made]
        tokens, first = self.tokens_at(self.places[live], self.positions[live]), self._response_positions()
        step = 0
        while len(live):
            logits = forward(tokens, live, step)
            layout = Rows(np.arange(len(live) + 1), first[live] + step, np.empty(0, np.int64))
            noise = [self._noise[i] for i in live.tolist()]
            histories = self._runner.histories_of(
                self.places[live], noise, [drafted[i] for i in live.tolist()]
            )
            verified = sample(logits, layout, DrawSettings.of(noise), noise, {}, histories=histories)
            goes_on = np.zeros(len(live), bool)
            for j, (i, token) in enumerate(zip(live.tolist(), verified.tokens.tolist(), strict=True)):
                # Not finite: the drafter has not this token, or is broken; nothing is told of such a draw.
                if token < 0 or not np.isfinite(verified.logprobs[j]):
                    continue
                made[i].tokens.append(token)
                made[i].logprobs.append(float(verified.logprobs[j]))
                goes_on[j] = step + 1 < self.limits[i] and token not in self._stops[i]
            live, tokens = live[goes_on], verified.tokens[goes_on]
            step += 1
        pairs = zip(self.asks, made, strict=True)
        return {ask.sample_id: proposal for ask, proposal in pairs if proposal.tokens}

    def _response_positions(self) -> IntArray:
        """Return the response position that the first draft token has, [n]."""
        prompts: npt.NDArray[Any] = self._runner.input_batch.num_prompt_tokens[self.places]
        found: IntArray = (self.positions + 1 - prompts).astype(np.int64)
        return found
