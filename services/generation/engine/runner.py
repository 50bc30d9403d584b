"""vLLM's V1 model runner with the coupled sampler in place of its sampler and rejection sampler.

Our own loop puts drafts on the scheduler's requests (`core_steps.py`), without a `speculative_config`, so vLLM's
own speculation costs nothing: drafts are not padded, CUDA graph sizes are not rounded, and a step without drafts
is a plain step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from services.generation.engine.grammars import GrammarState, grammars_of, masks_for
from services.generation.engine.recurrent_states import RecurrentStates, recurrent_states
from services.generation.engine.sampling.constraints import Histories, History, RowMasks, TokenCounts
from services.generation.engine.sampling.inputs import (
    CACHED_KEY,
    CONTEXT,
    RECORDED_KEY,
    SETTINGS_KEY,
    CachedRollout,
    DraftsOfRow,
    LatestSettings,
    RecordedDrafts,
    SampleSettings,
)
from services.generation.engine.sampling.outputs import FILLER, PromptReading, pack
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.sampling.sampler import Verified, sample

if TYPE_CHECKING:
    from services.generation.engine.draft_forms import WorkerForm
    from services.generation.engine.draft_models.eagle3 import Features


class CoupledRunnerMixin:
    """Mixin for vLLM's model runner. The annotations name the attributes of the runner that it uses."""

    requests: dict[str, CachedRequestState]
    input_batch: Any
    speculative_config: Any
    discard_request_mask: Any
    query_start_loc: Any
    positions: torch.Tensor
    get_model: Any
    model_config: Any
    device: torch.device
    compilation_config: Any
    kv_cache_config: Any
    # Store of the target's hidden states for a draft model; None if there is none.
    features: Features | None
    _scheduled: int
    _drafts: Mapping[str, Sequence[int]]

    def init_coupled(self) -> None:
        """Set up the state that this mixin adds. Called once, after vLLM's own constructor."""
        # Data of samples, by id. A preemption keeps all of it.
        self._settings: dict[str, SampleSettings] = {}
        self._latest = LatestSettings()
        # Only of samples that have reused every token so far.
        self._followed: dict[str, CachedRollout] = {}
        self._recorded: dict[str, RecordedDrafts] = {}
        # Only of samples that request scores of their prompts.
        self._prompts: dict[str, PromptReading] = {}
        self._grammars: dict[str, GrammarState] = {}
        self.features = None
        # None if no layer is recurrent, or nothing is drafted.
        self.states: RecurrentStates | None = None
        # None if drafts are chains.
        self.draft_form: WorkerForm | None = None
        # Counts for the samples with penalties; None before the first of them. They survive a preemption, too.
        self._counts: TokenCounts | None = None

    def adopt_sample(
        self,
        sample_id: str,
        prompt: list[int],
        output: list[int],
        params: SamplingParams,
        blocks: tuple[list[int], ...],
    ) -> None:
        """Register a sample that has output already, so that the scheduler can resume or continue it.

        The scheduler names resumed requests to a runner only by id. For a request that the runner has never seen,
        this creates the state that a preemption would have left. `blocks` are its blocks, by kind of KV.
        """
        self.requests[sample_id] = CachedRequestState(
            req_id=sample_id,
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=params,
            generator=None,
            block_ids=blocks,
            num_computed_tokens=0,
            output_token_ids=list(output),
        )

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        layers = self.compilation_config.static_forward_context
        tables = self.input_batch.block_table
        self.states = recurrent_states(self.kv_cache_config, layers, tables, self.device)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        if self.draft_form is not None:
            self.draft_form.computed()
        if self.features is not None:
            self.features.keep(output[1], self._scheduled)
        return output

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        self._scheduled = scheduler_output.total_num_scheduled_tokens
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        # vLLM lays out several rows of logits for a request only if there is a speculative config; this method of
        # vLLM's does not read it.
        if not self._drafts:
            if self.draft_form is not None:
                self.draft_form.clear()
            if self.states is not None:
                self.states.keep(self.input_batch.block_table, self.input_batch.req_ids, ())
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        self.speculative_config = object()
        try:
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        finally:
            self.speculative_config = None
        if self.states is not None:
            batch = self.input_batch
            drafted = [batch.req_id_to_index[sample_id] for sample_id in self._drafts]
            self.states.keep(batch.block_table, batch.req_ids, drafted)
        if self.draft_form is not None and self.draft_form.pending:
            batch = self.input_batch
            starts = self.query_start_loc.np[: batch.num_reqs + 1].astype(np.int64)
            self.draft_form.lay_out(batch, self._rows(batch), starts, self.positions)
        return prepared

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        batch = self.input_batch
        rows = self._rows(batch)
        settings = self._latest.of(batch.req_ids, self.settings_of)
        followed = self._followed_in(batch) if self._followed else {}
        masks = self._masks_of(rows, logits.shape[1]) if self._grammars else None
        histories = None
        if settings.edited:
            histories = self.histories_of(np.arange(len(settings.samples)), settings.samples)
        recorded = self._recorded_in(batch, rows) if self._recorded else None
        given = (settings, followed, masks, histories, recorded)
        verify = sample if self.draft_form is None else self.draft_form.sample
        verified: Verified = verify(logits, rows, *given)
        if self.states is not None and self._drafts:
            verifying = np.diff(rows.cu)
            refused = np.flatnonzero((verifying > 1) & (verified.counts < verifying))
            self.states.take_back(batch.block_table, batch.req_ids, refused.tolist())
        for i, rollout in followed.items():
            end = rows.positions[i] + verified.reused[i]
            if verified.reused[i] < verified.counts[i] or end >= len(rollout.tokens):
                del self._followed[batch.req_ids[i]]
        return _sampler_output(rows, verified)

    def histories_of(
        self,
        places: IntArray,
        settings: Sequence[SampleSettings],
        more: Sequence[Sequence[int]] | None = None,
    ) -> Histories | None:
        """Return the token counts of the samples at `places` of the batch; None if none of them has penalties.

        Args:
            places: indices in the batch, [n].
            settings: settings of these samples, n of them.
            more: tokens of each sample that the batch does not have yet.
        """
        if not any(each.penalised for each in settings):
            return None
        batch = self.input_batch
        if self._counts is None:
            self._counts = TokenCounts(self.model_config.get_vocab_size(), self.device)
        found: list[History | None] = []
        for place, each in zip(places.tolist(), settings, strict=True):
            prompt, end = int(batch.num_prompt_tokens[place]), int(batch.num_tokens_no_spec[place])
            tokens = batch.token_ids_cpu[place]
            own = History(batch.req_ids[place], tokens[:prompt], tokens[prompt:end])
            found.append(own if each.penalised else None)
        return self._counts.histories(found, more)

    def _followed_in(self, batch: Any) -> dict[int, CachedRollout]:
        """Return the cached rollouts of the samples in the batch, by index.

        Samples whose prompt is only partly computed are left out, because the tokens of their rows are discarded.
        """
        discarded = self.discard_request_mask.np
        return {
            i: self._followed[sample_id]
            for i, sample_id in enumerate(batch.req_ids)
            if sample_id in self._followed and not discarded[i]
        }

    def _recorded_in(self, batch: Any, rows: Rows) -> dict[int, DraftsOfRow]:
        """Return the records of the samples that have drafts and a record, by index."""
        found = {}
        for i, sample_id in enumerate(batch.req_ids):
            if sample_id in self._recorded and rows.cu[i + 1] - rows.cu[i] > 1:
                end = int(batch.num_tokens_no_spec[i])
                before = batch.token_ids_cpu[i, max(end - CONTEXT, 0) : end]
                found[i] = DraftsOfRow(self._recorded[sample_id], before)
        return found

    def _masks_of(self, rows: Rows, vocab_size: int) -> RowMasks | None:
        """Return the masks of rows whose samples follow a grammar; None if the batch has no such sample."""
        batch, chosen = self.input_batch, list[int]()
        masks = masks_for(int(rows.cu[-1]), vocab_size)
        for place, sample_id in enumerate(batch.req_ids):
            if (grammar := self._grammars.get(sample_id)) is None:
                continue
            begin = int(batch.num_prompt_tokens[place])
            response = batch.token_ids_cpu[place, begin : begin + int(rows.positions[place])]
            first, last = int(rows.cu[place]), int(rows.cu[place + 1])
            grammar.fill(response.tolist(), rows.drafts_of(place).tolist(), masks, first)
            chosen += range(first, last)
        return RowMasks(masks, chosen) if chosen else None

    def _rows(self, batch: Any) -> Rows:
        """Return the layout of the step, with its drafts as they were scheduled."""
        n = batch.num_reqs
        positions = (batch.num_tokens_no_spec[:n] - batch.num_prompt_tokens[:n]).astype(np.int64)
        drafts = [self._drafts.get(sample_id, ()) for sample_id in batch.req_ids] if self._drafts else []
        if not drafts:
            return Rows(np.arange(n + 1), positions, np.empty(0, np.int64))
        cu = np.zeros(n + 1, np.int64)
        np.cumsum([len(each) + 1 for each in drafts], out=cu[1:])
        return Rows(cu, positions, np.fromiter(chain.from_iterable(drafts), np.int64))

    def settings_of(self, sample_id: str) -> SampleSettings:
        """Return the settings of a sample; at its first step, also take in its other data for the sampler."""
        known = self._settings.get(sample_id)
        if known is None:
            params = self.requests[sample_id].sampling_params
            known = SampleSettings(**params.extra_args[SETTINGS_KEY])  # type: ignore[union-attr,index]
            self._settings[sample_id] = known
            if known.json_schema:
                model = self.model_config
                grammars = grammars_of(Path(model.model), model.get_vocab_size())
                self._grammars[sample_id] = grammars.begin(known.json_schema, known.stops)
            if known.prompt_logprobs is not None:
                prompt = self.requests[sample_id].prompt_token_ids
                self._prompts[sample_id] = PromptReading(list(prompt or ()), known.prompt_logprobs)
            if CACHED_KEY in params.extra_args:  # type: ignore[union-attr,operator]
                self._followed[sample_id] = params.extra_args[CACHED_KEY]  # type: ignore[union-attr,index]
            if RECORDED_KEY in params.extra_args:  # type: ignore[union-attr,operator]
                self._recorded[sample_id] = params.extra_args[RECORDED_KEY]  # type: ignore[union-attr,index]
        return known

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        """Score the prompts that the step has computed; returns the scores that are complete, by sample."""
        found: dict[str, Any] = {}
        discarded = self.discard_request_mask.np
        for sample_id, reading in self._prompts.items() if self._prompts else ():
            place = self.input_batch.req_id_to_index.get(sample_id)
            if reading.reported or place is None or sample_id not in num_scheduled_tokens:
                continue
            begin = self.requests[sample_id].num_computed_tokens
            first = int(self.query_start_loc.np[place])
            states = hidden_states[first : first + num_scheduled_tokens[sample_id]]
            reading.read(states, begin, self.get_model().compute_logits)
            if not discarded[place]:
                reading.reported = True
                found[sample_id] = reading.scores
        return found

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        self._settings.pop(req_id, None)
        self._latest.forget()
        self._followed.pop(req_id, None)
        self._recorded.pop(req_id, None)
        self._prompts.pop(req_id, None)
        self._grammars.pop(req_id, None)
        if self._counts is not None:
            self._counts.forget(req_id)
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]


def _sampler_output(rows: Rows, verified: Verified) -> SamplerOutput:
    """Lay the emitted tokens out as vLLM expects: [n, longest], with FILLER after each sample's last token.

    They stay in host memory, where vLLM needs them.
    """
    n, width = len(verified.counts), int(np.diff(rows.cu).max())
    keep = np.arange(width) < verified.counts[:, None]
    source = verified.sources(rows, width)
    # A row that could not be sampled becomes token 0 with a NaN log-probability; the engine ends the sample.
    tokens = np.where(keep, np.maximum(verified.tokens[source], 0), FILLER).astype(np.int32)
    logprobs = np.where(keep, verified.logprobs[source], 0).astype(np.float32)
    # Each token, then the likeliest tokens of its position.
    ids = np.maximum(tokens, 0).reshape(n * width, 1)
    ids = np.concatenate((ids, verified.top_tokens[source.reshape(-1)]), axis=1)
    values = np.concatenate(
        (logprobs.reshape(n * width, 1), verified.top_logprobs[source.reshape(-1)]), axis=1
    )
    marks = pack(np.diff(rows.cu) - 1, verified.counts - 1, verified.reused, width)
    return SamplerOutput(
        sampled_token_ids=torch.from_numpy(tokens),
        logprobs_tensors=LogprobsTensors(
            torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(values), torch.from_numpy(marks)
        ),
    )


def coupled(runner_class: type) -> type:
    """Return the coupled version of a model runner class."""
    return type(f"Coupled{runner_class.__name__}", (CoupledRunnerMixin, runner_class), {})
