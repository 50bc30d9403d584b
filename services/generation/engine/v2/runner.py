"""vLLM's V2 model runner with the coupled sampler in place of its sampler and rejection sampler.

As on V1 there is no `speculative_config`: the scheduler knows how many drafts a sample verifies, and the drafts
come as segments of references. When a step begins, they are copied from the table of references to the place where
vLLM's runner reads drafts. Nothing here waits for the device, except for samples that follow a grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from kernels.transfer import uploaded
from services.generation.engine.grammars import GrammarState, grammars_of, masks_for
from services.generation.engine.sampling.constraints import RowMasks
from services.generation.engine.sampling.inputs import CACHED_KEY, LatestSettings, SampleSettings
from services.generation.engine.sampling.outputs import PromptReading, PromptScores
from services.generation.engine.v2.references import LONGEST_DRAFT, References, RolloutTable
from services.generation.engine.v2.row_sampler import DeviceRows, proposals_of_rows, sample_rows, settings_of


class _ReadPrompt:
    """Scores of one prompt, already in host memory, with the interface of vLLM's tensors."""

    def __init__(self, scores: PromptScores) -> None:
        self._scores = scores

    def to_cpu_nonblocking(self) -> PromptScores:
        """Return the scores."""
        return self._scores


class PromptReader:
    """Scores prompts a few rows at a time; vLLM's own reader computes the logits of a whole prompt at once.

    We call `begin` and `end`; vLLM's runner calls the other methods.
    """

    def __init__(self) -> None:
        # By sample id. A preemption keeps them, so that no prompt is reported twice.
        self.readings: dict[str, PromptReading] = {}

    def begin(self, sample_id: str, prompt: list[int], most: int) -> None:
        """Score the prompt of a sample, with the `most` likeliest tokens of each position."""
        self.readings[sample_id] = PromptReading(list(prompt), most)

    def end(self, sample_id: str) -> None:
        """Forget a sample. Unknown ones are ignored."""
        self.readings.pop(sample_id, None)

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Do nothing: `begin` adds samples."""

    def remove_request(self, req_id: str) -> None:
        """Do nothing: a preempted sample comes back."""

    def compute_prompt_logprobs(
        self,
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,
        input_batch: Any,
        *unused: Any,
    ) -> dict[str, Any]:
        """Score the prompts that the step has computed; returns the scores that are complete, by sample."""
        found: dict[str, Any] = {}
        for place, sample_id in enumerate(input_batch.req_ids) if self.readings else ():
            reading = self.readings.get(sample_id)
            if reading is None or reading.reported:
                continue
            begin, first = (
                int(input_batch.num_computed_tokens_np[place]),
                int(input_batch.query_start_loc_np[place]),
            )
            count = int(input_batch.num_scheduled_tokens[place])
            reading.read(hidden_states[first : first + count], begin, logits_fn)
            if begin + count >= int(input_batch.prefill_len_np[place]):
                reading.reported = True
                found[sample_id] = _ReadPrompt(reading.scores)
        return found

    def compute_prompt_token_id_logprobs(self, *unused: Any) -> dict[str, Any]:
        """Return no scores: Paceline does not request them."""
        return {}


class CoupledV2RunnerMixin:
    """Mixin for vLLM's V2 model runner. The annotations name the attributes of the runner that it uses."""

    req_states: Any
    sampler: Any
    model: Any
    model_config: Any
    prompt_logprobs_worker: Any
    decode_query_len: int
    _remove_request: Any

    def init_coupled(self) -> None:
        """Set up the state that this mixin adds. Called once, between vLLM's constructor and `load_model`."""
        self._settings: dict[str, SampleSettings] = {}
        self._latest = LatestSettings()
        self._grammars: dict[str, GrammarState] = {}
        self._references = References(self.req_states)
        # Preempted samples keep their rows.
        self._followed = RolloutTable(self.req_states.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and replace vLLM's reader of prompts."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.prompt_logprobs_worker = PromptReader()

    # -- samples ------------------------------------------------------------------------------------------

    def release_sample(self, sample_id: str) -> None:
        """Free the slot of a sample until it is adopted again or ends."""
        self._remove_request(sample_id)

    def add_requests(self, scheduler_output: Any) -> None:
        """Add new samples, resumed ones, and samples that arrive with their KV; each gets a slot."""
        # vLLM's own steps, with which it warms up, do not have this attribute.
        adopted = getattr(scheduler_output, "paceline_adopted", ())
        entering = SimpleNamespace(scheduled_new_reqs=[*scheduler_output.scheduled_new_reqs, *adopted])
        super().add_requests(entering)  # type: ignore[misc]
        for sample in entering.scheduled_new_reqs:
            self._references.clear(self.req_states.req_id_to_index[sample.req_id])
            if sample.req_id in self._settings:
                continue
            settings = settings_of(sample.sampling_params)
            self._settings[sample.req_id] = settings
            if settings.json_schema:
                model = self.model_config
                grammars = grammars_of(Path(model.model), model.get_vocab_size())
                self._grammars[sample.req_id] = grammars.begin(settings.json_schema, settings.stops)
            if CACHED_KEY in (sample.sampling_params.extra_args or {}):
                self._followed.begin(sample.req_id, sample.sampling_params.extra_args[CACHED_KEY])
            if settings.prompt_logprobs is not None:
                self.prompt_logprobs_worker.begin(
                    sample.req_id, sample.prompt_token_ids, settings.prompt_logprobs
                )

    def finish_requests(self, scheduler_output: Any) -> None:
        """Forget samples that have ended; our data of preempted samples is kept."""
        super().finish_requests(scheduler_output)  # type: ignore[misc]
        for sample_id in getattr(scheduler_output, "paceline_left", ()):
            self._followed.end(sample_id)
        for sample_id in scheduler_output.finished_req_ids:
            self._settings.pop(sample_id, None)
            self._latest.forget()
            self._grammars.pop(sample_id, None)
            self._followed.end(sample_id)
            self.prompt_logprobs_worker.end(sample_id)

    # -- each step ----------------------------------------------------------------------------------------

    def prepare_inputs(
        self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, num_active_loras: int
    ) -> Any:
        """Prepare a step as vLLM does, with its drafts from the references."""
        given = (scheduler_output, batch_req_state, batch_desc, num_active_loras)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._references.post(getattr(scheduler_output, "paceline_segments", ()))
        if not drafts:
            return super().prepare_inputs(*given)  # type: ignore[misc]
        states = self.req_states
        slots = torch.tensor([states.req_id_to_index[each] for each in drafts])
        slots = uploaded({"slots": slots}, states.device)["slots"]
        self._references.draft(slots, max(map(len, drafts.values())))
        # vLLM's kernels allocate this many rows for a sample. Outside this call, where CUDA graphs are captured,
        # it is the number of rows of plain decoding.
        plain, self.decode_query_len = self.decode_query_len, LONGEST_DRAFT + 1
        try:
            return super().prepare_inputs(*given)  # type: ignore[misc]
        finally:
            self.decode_query_len = plain

    def sample(
        self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Verify the drafts of a step, and sample from it; overrides vLLM's method."""
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        rows = self._rows(input_batch)
        batch = self._latest.of(input_batch.req_ids, self._settings.__getitem__)
        masks = self._masks_of(input_batch, rows, logits.shape[1]) if self._grammars else None

        def penalise(scores: torch.Tensor) -> None:
            self.sampler.penalties_state.apply(scores, _context_of(input_batch))

        followers = self._followed.among(input_batch.req_ids) if self._followed else None
        proposals = proposals_of_rows(rows, batch, followers, self._followed)
        found = sample_rows(logits, rows, batch, penalise, masks, proposals)
        counts = found.counts
        whole = self._whole(input_batch)
        if followers is not None:
            all_whole = torch.ones_like(counts, dtype=torch.bool) if whole is None else whole
            self._followed.advance(followers, rows.positions, counts, found.reused, all_whole)
        refused = torch.zeros_like(counts) if rows.plain else input_batch.cu_num_logits.diff() - counts
        if whole is not None:
            counts, refused = torch.where(whole, counts, 0), torch.where(whole, refused, 0)
        emitted, rejected = counts.to(torch.int32), refused.to(torch.int32)
        output = SamplerOutput(found.tokens, found.logprobs, None, emitted, rejected)
        return output, emitted, rejected

    def _whole(self, input_batch: Any) -> torch.Tensor | None:
        """Return which samples have all of their prompt computed with this step, [n] bool; None if all have.

        Tokens that are sampled after a part of a prompt are discarded. The host knows the length of such a sample;
        of others it knows a bound, which is not below their prompt's length.
        """
        states, n = self.req_states, len(input_batch.req_ids)
        bounds = input_batch.seq_lens_cpu_upper_bound.numpy()[:n]
        if (bounds >= states.prefill_len.np[input_batch.idx_mapping_np[:n]]).all():
            return None
        whole: torch.Tensor = input_batch.seq_lens[:n] >= states.prefill_len.gpu[input_batch.idx_mapping[:n]]
        return whole

    def _rows(self, input_batch: Any) -> DeviceRows:
        states, slots = self.req_states, input_batch.idx_mapping
        positions = (states.total_len.gpu[slots] - states.prompt_len.gpu[slots]).long()
        inputs = input_batch.input_ids[input_batch.logits_indices]
        return DeviceRows(input_batch.cu_num_logits_np.astype(np.int64), positions, inputs)

    def _masks_of(self, input_batch: Any, rows: DeviceRows, vocab_size: int) -> RowMasks | None:
        """Return the masks of rows whose samples follow a grammar; None if there are none. Waits for the device."""
        states, chosen = self.req_states, list[int]()
        followed = [i for i, each in enumerate(input_batch.req_ids) if each in self._grammars]
        if not followed:
            return None
        inputs, total = rows.inputs.cpu(), states.total_len.gpu.cpu()
        masks = masks_for(len(rows.samples), vocab_size)
        for i in followed:
            slot = int(input_batch.idx_mapping_np[i])
            response = states.all_token_ids.gpu[
                slot, int(states.prompt_len.np[slot]) : int(total[slot])
            ].cpu()
            first, last = int(rows.cu[i]), int(rows.cu[i + 1])
            drafts = inputs[first + 1 : last].tolist()
            self._grammars[input_batch.req_ids[i]].fill(response.tolist(), drafts, masks, first)
            chosen += range(first, last)
        return RowMasks(masks, chosen)


def _context_of(input_batch: Any) -> LogitsContext:
    """Return the layout of a step for vLLM's penalties."""
    return LogitsContext(
        expanded_idx_mapping=input_batch.expanded_idx_mapping,
        idx_mapping=input_batch.idx_mapping,
        idx_mapping_np=input_batch.idx_mapping_np,
        expanded_local_pos=input_batch.expanded_local_pos,
        input_ids=input_batch.input_ids[input_batch.logits_indices],
        pos=input_batch.positions[input_batch.logits_indices],
        seq_lens_upper_bound_np=input_batch.seq_lens_cpu_upper_bound.numpy(),
    )


def coupled_v2(runner_class: type) -> type:
    """Return the coupled version of a V2 model runner class."""
    return type(f"Coupled{runner_class.__name__}", (CoupledV2RunnerMixin, runner_class), {})
