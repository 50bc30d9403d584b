"""From logits to tokens: vLLM's masks and penalties, then the coupled arg-max with verification.

One row of logits is one position of one sample. A sample with k draft tokens has k + 1 rows, in order: row j
was computed with the first j draft tokens in place, so it is the target's distribution after them. Plain
decoding is the case k = 0 for every sample; there is no other code path, and that is what makes speculation on
and off agree token for token (DESIGN section 4). Samples may ask for rejection instead, in the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from kernels.coupled_sampler.cpu import coupled_verify
from services.generation.engine.noise import SampleNoise
from services.generation.engine.rejection import rejection_verify
from services.generation.engine.types import Verifier

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The layout of a step's logits: `cu[i]:cu[i+1]` are the rows of sample i; n samples, R rows.

    `positions[i]` counts the response tokens that sample i had before the step. `drafts` are the draft tokens
    of all samples, one after another.
    """

    cu: IntArray
    positions: IntArray
    drafts: IntArray

    @property
    def samples(self) -> IntArray:
        """Sample of each row, [R]."""
        return np.repeat(np.arange(len(self.cu) - 1), np.diff(self.cu))

    @property
    def row_positions(self) -> IntArray:
        """Response position that each row samples, [R]."""
        samples = self.samples
        return self.positions[samples] + np.arange(self.cu[-1]) - self.cu[:-1][samples]

    def drafts_of(self, sample: int) -> list[int]:
        """Draft tokens of one sample."""
        begin, end = int(self.cu[sample]) - sample, int(self.cu[sample + 1]) - sample - 1
        return self.drafts[begin:end].tolist()  # type: ignore[no-any-return]

    def part(self, chosen: npt.NDArray[np.bool_]) -> tuple[IntArray, Rows]:
        """The rows of some samples ([n] bool): their indices here, and their layout among themselves."""
        index = np.flatnonzero(chosen[self.samples])
        cu = np.concatenate(([0], np.cumsum(np.diff(self.cu)[chosen])))
        draft_owner = np.repeat(np.arange(len(chosen)), np.diff(self.cu) - 1)
        return index, Rows(cu, self.positions[chosen], self.drafts[chosen[draft_owner]])


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens of a step: sample i emits `counts[i]` tokens, `tokens[cu[i] : cu[i] + counts[i]]`.

    `logprobs` [R] is filled for emitted rows. NaN marks a row from which nothing could be sampled.
    """

    tokens: IntArray
    counts: IntArray
    logprobs: npt.NDArray[np.float32]


def sample(
    logits: torch.Tensor, rows: Rows, metadata: SamplingMetadata, noise: list[SampleNoise]
) -> Verified:
    """Verify the drafts and sample the next token of every sample.

    Args:
        logits: [R, V], any float type; left as it is.
        rows: the layout.
        metadata: vLLM's sampling parameters, a row per sample.
        noise: one per sample.
    """
    raw = logits.float()
    temperature = _temperatures(metadata, len(noise))
    processed, divided = _constrain(raw, rows, metadata, noise, temperature)
    # A row that the masks have divided by its temperature already is sampled at 1; greedy stays 0.
    effective = np.where(temperature > 0, np.float32(1), np.float32(0)) if divided else temperature
    tokens, counts = _verify(_numpy(processed), rows, effective.astype(np.float32), noise)
    logprobs = _logprobs(raw, processed, divided, temperature, rows, noise, tokens, counts)
    return Verified(tokens, counts, logprobs)


def _verify(
    logits: npt.NDArray[np.float32],
    rows: Rows,
    temperature: npt.NDArray[np.float32],
    noise: list[SampleNoise],
) -> tuple[IntArray, IntArray]:
    """(tokens [R], emitted tokens [n]), each sample by its own verifier."""
    seeds = np.fromiter((item.seed for item in noise), np.uint64, len(noise))
    by_rejection = np.fromiter((item.verifier is Verifier.REJECTION for item in noise), bool, len(noise))
    if not by_rejection.any():
        return coupled_verify(logits, seeds, rows.positions, temperature, rows.drafts, rows.cu)
    tokens, counts = np.empty(len(logits), np.int64), np.empty(len(noise), np.int64)
    for verify, chosen in ((rejection_verify, by_rejection), (coupled_verify, ~by_rejection)):
        if not chosen.any():
            continue
        index, part = rows.part(chosen)
        tokens[index], counts[chosen] = verify(
            logits[index], seeds[chosen], part.positions, temperature[chosen], part.drafts, part.cu
        )
    return tokens, counts


def _numpy(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().cpu().contiguous().numpy()  # type: ignore[no-any-return]


def _temperatures(metadata: SamplingMetadata, n: int) -> npt.NDArray[np.float32]:
    if metadata.all_greedy or metadata.temperature is None:
        return np.zeros(n, np.float32)
    return metadata.temperature[:n].cpu().numpy()  # type: ignore[no-any-return]


def _constrain(
    raw: torch.Tensor,
    rows: Rows,
    metadata: SamplingMetadata,
    noise: list[SampleNoise],
    temperature: npt.NDArray[np.float32],
) -> tuple[torch.Tensor, bool]:
    """Apply penalties and masks by row. Returns the logits and whether they were divided by temperature."""
    penalised = not metadata.no_penalties
    withheld = any(item.min_tokens for item in noise) and _withheld(rows, noise)
    masked = metadata.top_k is not None or metadata.top_p is not None or any(item.min_p for item in noise)
    if not (penalised or withheld or masked):
        return raw, False
    logits = raw.clone()
    index = torch.from_numpy(rows.samples).to(logits.device)
    if penalised:
        logits = _penalise(logits, index, rows, metadata)
    for row, tokens in withheld or ():
        logits[row, tokens] = float("-inf")
    if masked:
        _mask(logits, index, metadata, noise, temperature)
    return logits, masked


def _withheld(rows: Rows, noise: list[SampleNoise]) -> list[tuple[int, list[int]]]:
    """Rows that may not end their sample yet, with the tokens that would."""
    found = []
    positions = rows.row_positions
    for row, owner in enumerate(rows.samples):
        item = noise[owner]
        if item.forbidden and positions[row] < item.min_tokens:
            found.append((row, list(item.forbidden)))
    return found


def _penalise(
    logits: torch.Tensor, index: torch.Tensor, rows: Rows, metadata: SamplingMetadata
) -> torch.Tensor:
    outputs: list[list[int]] = []
    for i in range(len(rows.cu) - 1):
        history, drafts = list(metadata.output_token_ids[i]), rows.drafts_of(i)
        outputs.extend([*history, *drafts[:j]] for j in range(len(drafts) + 1))
    assert metadata.prompt_token_ids is not None
    return apply_all_penalties(
        logits,
        metadata.prompt_token_ids[index],
        metadata.presence_penalties[index],
        metadata.frequency_penalties[index],
        metadata.repetition_penalties[index],
        outputs,
    )


def _mask(
    logits: torch.Tensor,
    index: torch.Tensor,
    metadata: SamplingMetadata,
    noise: list[SampleNoise],
    temperature: npt.NDArray[np.float32],
) -> None:
    """Divide by temperature, then min-p, top-k and top-p, in vLLM's order, in place. Greedy rows keep theirs."""
    divisor = torch.from_numpy(np.where(temperature > 0, temperature, 1).astype(np.float32))
    logits.div_(divisor.to(logits.device)[index].unsqueeze(1))
    if any(item.min_p for item in noise):
        min_p = torch.tensor([item.min_p for item in noise], device=logits.device)[index]
        probabilities = logits.softmax(dim=-1)
        floor = probabilities.amax(dim=-1, keepdim=True) * min_p.unsqueeze(1)
        logits.masked_fill_(probabilities < floor, float("-inf"))
    top_k = None if metadata.top_k is None else metadata.top_k[index]
    top_p = None if metadata.top_p is None else metadata.top_p[index]
    logits.copy_(apply_top_k_top_p(logits, top_k, top_p))


def _logprobs(
    raw: torch.Tensor,
    processed: torch.Tensor,
    divided: bool,
    temperature: npt.NDArray[np.float32],
    rows: Rows,
    noise: list[SampleNoise],
    tokens: IntArray,
    counts: IntArray,
) -> npt.NDArray[np.float32]:
    """Log-probability of every emitted token, raw or processed as its sample asks; [R]."""
    samples = rows.samples
    emitted = np.flatnonzero(np.arange(len(samples)) - rows.cu[:-1][samples] < counts[samples])
    result = np.full(len(samples), np.nan, np.float32)
    wants = np.fromiter((item.processed_logprobs for item in noise), bool, len(noise))[samples]
    result[emitted] = _chosen_logprobs(raw, emitted, tokens)
    if wants.any():
        chosen = emitted[wants[emitted]]
        scaled = processed
        if not divided:
            divisor = np.where(temperature > 0, temperature, 1).astype(np.float32)[samples]
            scaled = processed / torch.from_numpy(divisor).to(processed.device).unsqueeze(1)
        result[chosen] = _chosen_logprobs(scaled, chosen, tokens)
    return result


def _chosen_logprobs(logits: torch.Tensor, emitted: IntArray, tokens: IntArray) -> npt.NDArray[np.float32]:
    index = torch.from_numpy(emitted).to(logits.device)
    part = logits if len(emitted) == len(logits) else logits[index]
    # A row that could not be sampled has token -1: any entry will do, its log-probability is NaN anyhow.
    chosen = torch.from_numpy(tokens[emitted]).clamp(min=0).to(logits.device)
    values = part.gather(1, chosen.unsqueeze(1)).squeeze(1) - part.logsumexp(dim=-1)
    result = _numpy(values)
    result[tokens[emitted] < 0] = np.nan
    return result
