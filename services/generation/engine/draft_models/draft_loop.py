"""Draft with a model for the running samples: select them, run forward passes, and draw with their noise.

A forward pass runs between two steps, on the block tables of the engine's samples. It writes the KV of its tokens
after the target's, into slots that the scheduler has allocated ahead. That KV is provisional: the target's next
step overwrites it before anything reads it.
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

from services.generation.engine.sampling.inputs import BatchSettings, SampleSettings
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.sampling.sampler import sample
from services.generation.engine.types import DraftRequest, ModelProposal, Verifier


class DraftPass:
    """Rows of a forward pass: `counts[i]` consecutive rows of sample i, from position `starts[i]`.

    `positions` and `slots` (in the paged KV): [rows] on the device, sample by sample.
    """

    def __init__(self, runner: Any, places: IntArray, starts: IntArray, counts: IntArray) -> None:
        """Lay out a pass.

        Args:
            runner: vLLM's model runner, between two steps.
            places: indices in its batch, [m].
            starts: first position of each sample, [m].
            counts: number of rows of each sample, at least 1, [m].
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
"""forward(tokens [m], live [m], step): the logits, [m, V], after the latest token of each live sample; draft steps
count from 0."""


class DraftRows:
    """Samples of one drafting round. Row i of every array is sample i; `places` are indices in the batch.

    Samples whose drafts are verified by rejection are left out, because their noise does not predict the target's
    tokens.
    """

    def __init__(self, runner: Any, requests: Sequence[DraftRequest]) -> None:
        """Select the samples that can be drafted for.

        Args:
            runner: vLLM's model runner, between two steps.
            requests: requests of at least one token each. Samples without a free slot, or whose length in the
                runner's batch differs from the scheduler's, are left out.
        """
        batch = runner.input_batch
        self._runner = runner
        table = batch.block_table[0]
        found: list[tuple[int, DraftRequest, int]] = []
        for request in requests:
            place = batch.req_id_to_index.get(request.sample_id)
            if place is None or int(batch.num_tokens_no_spec[place]) != request.length:
                continue
            if runner.settings_of(request.sample_id).verifier is Verifier.REJECTION:
                continue
            slots = int(table.num_blocks_per_row[place]) * table.block_size - (request.length - 1)
            if min(request.tokens, slots) > 0:
                found.append((place, request, min(request.tokens, slots)))
        self.requests = [request for _, request, _ in found]
        self.places: IntArray = np.array([place for place, _, _ in found], np.int64)
        self.limits: IntArray = np.array([limit for _, _, limit in found], np.int64)
        # Position of the sample's latest token, whose KV the target has not computed yet.
        self.positions: IntArray = np.array([request.length - 1 for request in self.requests], np.int64)
        own: list[SampleSettings] = [runner.settings_of(request.sample_id) for request in self.requests]
        # Drafted tokens are reported with the log-probabilities with which they were drawn.
        self._settings = [
            replace(each, processed_logprobs=True, top_logprobs=0, json_schema="") for each in own
        ]
        params = [runner.requests[request.sample_id].sampling_params for request in self.requests]
        self._stops = [frozenset(each.stop_token_ids or ()) for each in params]

    def __len__(self) -> int:
        return len(self.requests)

    def tokens_at(self, places: IntArray, positions: IntArray) -> IntArray:
        """Return the tokens at `positions` of the samples at `places` of the batch, [m]."""
        tokens: IntArray = self._runner.input_batch.token_ids_cpu[places, positions].astype(np.int64)
        return tokens

    def draft(self, live: IntArray, forward: Forward) -> dict[str, ModelProposal]:
        """Draft for the `live` samples, one token per draft step, up to their limits; returns proposals by sample.

        A draft ends at a stop token, or when no token can be drawn; the target then handles that itself.
        """
        made = [ModelProposal([], []) for _ in self.requests]
        drafted = [proposal.tokens for proposal in made]
        tokens, first = self.tokens_at(self.places[live], self.positions[live]), self._response_positions()
        step = 0
        while len(live):
            logits = forward(tokens, live, step)
            layout = Rows(np.arange(len(live) + 1), first[live] + step, np.empty(0, np.int64))
            batch = BatchSettings.of([self._settings[i] for i in live.tolist()])
            more = [drafted[i] for i in live.tolist()]
            histories = self._runner.histories_of(self.places[live], batch.samples, more)
            verified = sample(logits, layout, batch, {}, histories=histories)
            continues = np.zeros(len(live), bool)
            for j, (i, token) in enumerate(zip(live.tolist(), verified.tokens.tolist(), strict=True)):
                # Not finite: the draft model lacks this token, or is broken, so the draw is discarded.
                if token < 0 or not np.isfinite(verified.logprobs[j]):
                    continue
                made[i].tokens.append(token)
                made[i].logprobs.append(float(verified.logprobs[j]))
                continues[j] = step + 1 < self.limits[i] and token not in self._stops[i]
            live, tokens = live[continues], verified.tokens[continues]
            step += 1
        pairs = zip(self.requests, made, strict=True)
        return {request.sample_id: proposal for request, proposal in pairs if proposal.tokens}

    def _response_positions(self) -> IntArray:
        """Return the response position of the first draft token, [n]."""
        prompts: npt.NDArray[Any] = self._runner.input_batch.num_prompt_tokens[self.places]
        found: IntArray = (self.positions + 1 - prompts).astype(np.int64)
        return found
