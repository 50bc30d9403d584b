"""Sample and verify a step of V2's runner on the device: no number of it is needed in host memory.

As `sampling.sampler`: a sample with k draft tokens has k + 1 rows, and plain decoding is the case k = 0. A draft is
accepted iff it is the token that the sample's noise picks, or by its probability, if it is a proposal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors

from kernels.coupled_sampler.proposals import RowProposals
from kernels.coupled_sampler.runner_up import runner_up
from kernels.coupled_sampler.sample import Edited, Sampled, sample
from services.generation.engine.marks import NO_TOKEN, pack_rows
from services.generation.engine.sampling.constraints import RowMasks, chunks
from services.generation.engine.v2.device_rows import DeviceRows
from services.generation.engine.v2.row_constraints import Penalise, constrain
from services.generation.engine.v2.settings import BatchSettings


class SampledRows(NamedTuple):
    """Outcome of a step, on the device: n samples, R rows, `longest` of them of one sample.

    `tokens` [n, longest] int64, of which the first `counts` [n] of each sample are emitted; of those the first
    `reused` [n] are taken over from a cached rollout. `logprobs` are of all rows. A row that could not be sampled
    has token 0 with a NaN log-probability.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    reused: torch.Tensor
    logprobs: LogprobsTensors


def sample_rows(
    logits: torch.Tensor,
    rows: DeviceRows,
    batch: BatchSettings,
    penalise: Penalise,
    masks: RowMasks | None = None,
    proposals: RowProposals | None = None,
) -> SampledRows:
    """Verify the drafts and sample the next token of every sample.

    Args:
        logits: [R, V], any float type; left as it is.
        rows: the layout.
        batch: settings of the samples.
        penalise: applies the penalties of all rows.
        masks: of the rows of samples that follow a grammar.
        proposals: tokens to accept by their probability.
    """
    scores = constrain(logits, rows, batch, penalise, masks)
    there, width = _uploaded(rows, batch, proposals), int(np.diff(rows.cu).max())
    masked = {"top_k": batch.top_k, "top_p": batch.top_p, "min_p": batch.min_p}
    drawn = sample(
        logits,
        batch.seeds,
        rows.positions,
        torch.from_numpy(batch.temperature),
        rows.inputs[there["drafted"]].long(),
        torch.from_numpy(rows.cu),
        edited=None if scores is None else Edited(torch.arange(len(scores)), scores),
        proposals=proposals,
        **{name: torch.from_numpy(each) for name, each in masked.items() if each is not None},
    )
    tokens = drawn.tokens.clamp(min=0)
    emitted = tokens[there["places"]].view(-1, width)
    # An accepted draft is nothing that is taken over.
    reused = drawn.reused.masked_fill(there["residual"], 0) if proposals is not None else drawn.reused
    told = _logprobs(logits, scores, rows, batch, drawn, reused, there)
    return SampledRows(emitted, drawn.counts, reused, told)


def _uploaded(
    rows: DeviceRows, batch: BatchSettings, proposals: RowProposals | None
) -> dict[str, torch.Tensor]:
    """Return what the step needs of its layout on the device, by one copy.

    `drafted` are the rows that were computed from drafts, `places` [n * longest] the row of each emitted token. Of
    each row [R]: its sample, its offset, the drafts of its sample, and whether its log-probability is that of what
    is sampled from. With proposals `residual` [n] of them.
    """
    width = int(np.diff(rows.cu).max())
    vectors: dict[str, npt.NDArray[Any]] = {
        "drafted": np.flatnonzero(rows.offsets),
        "places": np.minimum(rows.cu[:-1, None] + np.arange(width), rows.cu[-1] - 1).reshape(-1),
        "samples": rows.samples,
        "offsets": rows.offsets,
        "drafts": rows.drafted[rows.samples],
        "processed": np.array([each.processed_logprobs for each in batch.samples], bool)[rows.samples],
    }
    if proposals is not None:
        vectors["residual"] = proposals.residual.numpy()
    return rows.put_all(**vectors)


def _logprobs(
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    rows: DeviceRows,
    batch: BatchSettings,
    drawn: Sampled,
    reused: torch.Tensor,
    there: dict[str, torch.Tensor],
) -> LogprobsTensors:
    """Return the log-probabilities of each row's token and of the likeliest ones, raw or processed."""
    tokens = drawn.tokens.clamp(min=0)
    values = torch.where(there["processed"], drawn.processed, drawn.logprobs)
    told, told_values = tokens.unsqueeze(1), values.unsqueeze(1)
    tied = np.array([each.near_ties for each in batch.samples], bool)
    most = max(max(each.top_logprobs for each in batch.samples), int(tied.any()))
    if most:
        best = _likeliest(logits, scores, rows, batch, drawn.lowest, most)
        if tied.any():
            _put_runners_up(best, logits, scores, rows, batch, drawn, tied)
        told, told_values = torch.cat((told, best[0]), 1), torch.cat((told_values, best[1]), 1)
    samples, offsets = there["samples"], there["offsets"]
    # All emitted tokens of a sample but the last are drafts.
    accepted = offsets < drawn.counts[samples] - 1
    marks = pack_rows(there["drafts"], accepted, offsets < reused[samples])
    return LogprobsTensors(told.to(torch.int32), told_values.float(), marks, rows.cu.tolist())


def _likeliest(
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    rows: DeviceRows,
    batch: BatchSettings,
    lowest: torch.Tensor | None,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens of the rows of samples that ask for them, [R, most], then NO_TOKEN."""
    asked = np.fromiter((each.top_logprobs for each in batch.samples), np.int64, len(batch.samples))
    tokens = torch.full((len(rows.samples), most), NO_TOKEN, dtype=torch.int64, device=rows.device)
    values = torch.zeros((len(rows.samples), most), dtype=torch.float32, device=rows.device)
    for processed in (False, True):
        own = [each.processed_logprobs is processed for each in batch.samples] & (asked > 0)
        chosen = np.flatnonzero(own[rows.samples])
        for begin, end in chunks(len(chosen), logits.shape[1]):
            index = chosen[begin:end]
            samples = rows.samples[index]
            there = rows.put_all(place=index, asked=asked[samples], divisor=batch.divisor[samples])
            place = there["place"]
            if processed:
                part = _scaled(logits if scores is None else scores, place, there["divisor"], lowest)
            else:
                part = logits[place].float()
            best = part.topk(most, dim=-1)
            beyond = torch.arange(most, device=rows.device) >= there["asked"].unsqueeze(1)
            tokens[place] = best.indices.masked_fill(beyond, NO_TOKEN)
            values[place] = best.values - part.logsumexp(dim=-1, keepdim=True)
    return tokens, values


def _put_runners_up(
    told: tuple[torch.Tensor, torch.Tensor],
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    rows: DeviceRows,
    batch: BatchSettings,
    drawn: Sampled,
    tied: npt.NDArray[np.bool_],
) -> None:
    """Put the runner-up of each row and its margin into the first column of `told`, for the samples in `tied`.

    Rows behind the emitted ones get some token of the vocabulary; the engine cuts them off.
    """
    chosen = np.flatnonzero(tied[rows.samples])
    seeds = batch.seeds.numpy()
    for begin, end in chunks(len(chosen), logits.shape[1]):
        index = chosen[begin:end]
        samples = rows.samples[index]
        there = rows.put_all(
            place=index,
            owner=samples,
            offset=rows.offsets[index],
            divisor=batch.divisor[samples],
            seeds=seeds[samples],
            noisy=batch.temperature[samples] > 0,
        )
        place = there["place"]
        part = _scaled(logits if scores is None else scores, place, there["divisor"], drawn.lowest)
        positions = rows.positions[there["owner"]] + there["offset"]
        winners = drawn.tokens[place].clamp(min=0)
        found = runner_up(part, winners, there["seeds"], positions, there["noisy"])
        told[0][place, 0], told[1][place, 0] = found


def _scaled(
    scores: torch.Tensor, place: torch.Tensor, divisor: torch.Tensor, lowest: torch.Tensor | None
) -> torch.Tensor:
    """Return divided and masked logits of some rows, [m, V] float32."""
    part = scores[place].float()
    part /= divisor.unsqueeze(1)
    if lowest is not None:
        part.masked_fill_(part < lowest[place].unsqueeze(1), -torch.inf)
    return part
