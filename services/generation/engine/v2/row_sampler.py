"""Sample and verify a step of V2's runner on the device, without reading any result on the host.

As in `sampling.sampler`, a sample with k draft tokens has k + 1 rows, and plain decoding is the case k = 0. A
draft is accepted iff it is the token that the sample's noise picks, or by its probability, if it is a proposal.

Layout, settings, penalties, masks by token and proposals are V1's, in the same order, for tokens that only the
device knows. Masks by probability (min-p, top-k, top-p) are applied by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors

from kernels.coupled_sampler.noise import Purpose
from kernels.coupled_sampler.proposals import NO_PROPOSAL, RowProposals, log_odds, uniforms
from kernels.coupled_sampler.sample import Edited, Sampled, runner_up, sample
from services.generation.engine.grammars import apply_masks
from services.generation.engine.sampling.constraints import RowMasks, chunks
from services.generation.engine.sampling.inputs import SETTINGS_KEY, BatchSettings, SampleSettings
from services.generation.engine.sampling.outputs import NO_TOKEN, pack_rows
from services.generation.engine.sampling.rows import IntArray, put
from services.generation.engine.v2.references import RolloutFollowers, RolloutTable

# Settings of vLLM's own requests, with which it warms up.
_NO_SETTINGS: dict[str, Any] = {"seed": 0}


def settings_of(params: SamplingParams) -> SampleSettings:
    """Return the settings of a request; vLLM's own requests get defaults."""
    return SampleSettings(**(params.extra_args or {}).get(SETTINGS_KEY, _NO_SETTINGS))


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Layout of a step: `cu[i]:cu[i+1]` are the rows of sample i; n samples, R rows.

    `positions` [n] int64 counts the response tokens that a sample had before the step. `inputs` [R] are the tokens
    from which the rows were computed; all but the first of a sample are its drafts. Both are on the device.
    """

    cu: IntArray
    positions: torch.Tensor
    inputs: torch.Tensor
    samples: IntArray = field(init=False)
    """Sample of each row, [R]."""
    offsets: IntArray = field(init=False)
    """Index of each row among the rows of its sample, [R]."""

    def __post_init__(self) -> None:
        samples = np.repeat(np.arange(len(self.cu) - 1), np.diff(self.cu))
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "offsets", np.arange(self.cu[-1]) - self.cu[:-1][samples])

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.positions.device

    @property
    def plain(self) -> bool:
        """True if no sample has a draft: each has one row."""
        return len(self.samples) == len(self.cu) - 1

    @property
    def drafted(self) -> IntArray:
        """Number of drafts of each sample, [n]."""
        drafted: IntArray = np.diff(self.cu) - 1
        return drafted

    def row_positions(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the response positions of rows given by their indices on the device, [m]."""
        there = self.put_all(samples=self.samples, offsets=self.offsets)
        positions: torch.Tensor = (self.positions[there["samples"]] + there["offsets"])[rows]
        return positions

    def put_all(self, **vectors: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
        """Return several vectors on the device, by one copy."""
        return put(self.device, **vectors)


Penalise = Callable[[torch.Tensor], None]
"""Applies penalties to the logits of a step, [R, V] float32, in place."""


def constrain(
    raw: torch.Tensor, rows: DeviceRows, batch: BatchSettings, penalise: Penalise, masks: RowMasks | None
) -> torch.Tensor | None:
    """Return the edited logits, [R, V] float32, before masks by probability; None if nothing changes them."""
    if not batch.edited and masks is None:
        return None
    samples = batch.samples
    penalised = any(each.penalised for each in samples)
    withheld = any(each.min_tokens and each.forbidden for each in samples)
    limited = any(each.allowed for each in samples)
    if not (penalised or withheld or limited or masks is not None):
        return None
    logits = raw.to(torch.float32, copy=True)
    if penalised:
        penalise(logits)
    if withheld:
        _withhold(logits, rows, batch)
    if limited:
        _limit(logits, rows, batch)
    if masks is not None:
        apply_masks(logits, masks.bits, masks.rows)
    return logits


def _withhold(logits: torch.Tensor, rows: DeviceRows, batch: BatchSettings) -> None:
    """Mask, in place, the tokens that would end a sample in rows where it may not end yet."""
    row, token, least = list[int](), list[int](), list[int]()
    for i, each in enumerate(batch.samples):
        if not (each.min_tokens and each.forbidden):
            continue
        own = range(int(rows.cu[i]), int(rows.cu[i + 1]))
        row += [place for place in own for _ in each.forbidden]
        token += list(each.forbidden) * len(own)
        least += [each.min_tokens] * (len(own) * len(each.forbidden))
    there = rows.put_all(row=np.array(row), token=np.array(token), least=np.array(least))
    place = (there["row"], there["token"])
    early = rows.row_positions(there["row"]) < there["least"]
    logits[place] = torch.where(early, -torch.inf, logits[place])


def _limit(logits: torch.Tensor, rows: DeviceRows, batch: BatchSettings) -> None:
    """Mask, in place, all but the allowed tokens in the rows of samples that have such."""
    allowed = [batch.samples[owner].allowed for owner in rows.samples]
    limited = np.flatnonzero([bool(each) for each in allowed])
    counts = [len(allowed[row]) for row in limited]
    token = np.fromiter(chain.from_iterable(allowed[row] for row in limited), np.int64, sum(counts))
    there = rows.put_all(limited=limited, row=np.repeat(limited, counts), token=token)
    place = (there["row"], there["token"])
    kept = logits[place]
    logits[there["limited"]] = -torch.inf
    logits[place] = kept


def proposals_of_rows(
    rows: DeviceRows, batch: BatchSettings, followers: RolloutFollowers | None, table: RolloutTable
) -> RowProposals | None:
    """Return the tokens that rows propose, and the least probability of each; None if nothing is proposed.

    Args:
        rows: layout of the step.
        batch: settings of the samples.
        followers: samples that may follow a cached rollout of the table.
        table: cached rollouts.
    """
    n, samples, rejecting = len(batch.samples), rows.samples, batch.rejecting
    if followers is None and not rejecting.any():
        return None
    raw = np.zeros(len(samples), bool)
    proposed = _Proposed(rows, batch.seeds)
    last = np.isin(np.arange(len(samples)), rows.cu[1:] - 1)
    if len(verified := np.flatnonzero(rejecting[samples] & ~last)):
        proposed.reject(verified)
    if followers is not None:
        own = np.zeros(n, bool)
        own[followers.places] = ~batch.processed_logprobs[followers.places]
        raw = own[samples]
        proposed.follow(followers, table)
    odds = log_odds(proposed.theta)
    return RowProposals(proposed.tokens, odds, torch.from_numpy(raw), torch.from_numpy(rejecting))


class _Proposed:
    """Proposed tokens of all rows, [R] int64, and the bounds that their probabilities must exceed, [R] float64."""

    def __init__(self, rows: DeviceRows, seeds: IntArray) -> None:
        self._rows, self._seeds, count = rows, seeds, len(rows.samples)
        self.tokens = torch.full((count,), NO_PROPOSAL, dtype=torch.int64, device=rows.device)
        self.theta = torch.full((count,), torch.nan, dtype=torch.float64, device=rows.device)

    def reject(self, index: IntArray) -> None:
        """Propose the drafts that follow some rows."""
        there = self._rows.put_all(rows=index, seeds=self._seeds[self._rows.samples[index]])
        place = there["rows"]
        self.tokens[place] = self._rows.inputs[place + 1].long()
        positions = self._rows.row_positions(place)
        self.theta[place] = uniforms(there["seeds"], positions, Purpose.REJECTION)

    def follow(self, followers: RolloutFollowers, table: RolloutTable) -> None:
        """Propose the next tokens of rollouts, in rows whose preceding drafts agree with the rollout."""
        rows = self._rows
        of_table = np.full(len(rows.cu) - 1, -1)
        of_table[followers.places] = followers.rows
        index = np.flatnonzero(of_table[rows.samples] >= 0)
        samples, offsets = rows.samples[index], rows.offsets[index]
        there = rows.put_all(
            rows=index,
            table=of_table[samples],
            offsets=offsets,
            first=np.arange(len(index)) - offsets,
            seeds=self._seeds[samples],
        )
        place, own = there["rows"], there["table"]
        positions = rows.row_positions(place)
        most = table.tokens.shape[1] - 1
        wanted = table.tokens[own, positions.clamp(max=most)].long()
        before = table.tokens[own, (positions - 1).clamp(0, most)]
        # A row is the target's distribution after the drafts before it: useless once they differ from the rollout.
        differs = ((there["offsets"] > 0) & (rows.inputs[place] != before)).long().cumsum(0)
        agrees = differs == differs[there["first"]]
        follows = agrees & table.live[own] & (positions < table.lengths[own])
        self.tokens[place] = torch.where(follows, wanted, NO_PROPOSAL)
        drawn = uniforms(there["seeds"], positions, Purpose.LENIENT)
        self.theta[place] = drawn * table.scales[own, positions.clamp(max=most)]


class SampledRows(NamedTuple):
    """Outcome of a step, on the device: n samples, R rows, at most `longest` of them of one sample.

    The first `counts` [n] of each sample's `tokens` [n, longest] int64 are emitted; the first `reused` [n] of these
    come from a cached rollout. `logprobs` covers all rows. A row that could not be sampled has token 0 with a NaN
    log-probability.
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
        logits: logits [R, V], any float type; not changed.
        rows: layout of the step.
        batch: settings of the samples.
        penalise: applies the penalties of all rows.
        masks: masks of the rows of samples that follow a grammar.
        proposals: tokens to accept by their probability.
    """
    scores = constrain(logits, rows, batch, penalise, masks)
    there = _uploaded(rows, batch, proposals)
    masked = {"top_k": batch.top_k, "top_p": batch.top_p, "min_p": batch.min_p}
    drawn = sample(
        logits,
        torch.from_numpy(batch.seeds),
        rows.positions,
        torch.from_numpy(batch.temperature),
        (rows.inputs[:0] if rows.plain else rows.inputs[there["drafted"]]).long(),
        torch.from_numpy(rows.cu),
        edited=None if scores is None else Edited(torch.arange(len(scores)), scores),
        proposals=proposals,
        **{name: torch.from_numpy(each) for name, each in masked.items() if each is not None},
    )
    tokens = drawn.tokens.clamp(min=0)
    # Each operation costs the host some microseconds, so a step without drafts skips what concerns them.
    emitted = tokens.unsqueeze(1) if rows.plain else tokens[there["places"]].view(len(batch.samples), -1)
    reused = drawn.reused
    if proposals is not None:
        # Accepted drafts of rejecting samples do not count as reused.
        reused = reused.masked_fill(there["residual"], 0)
    likeliest = _logprobs(logits, scores, rows, batch, drawn, tokens, there)
    marks = _marks(rows, drawn.counts, reused, there)
    return SampledRows(emitted, drawn.counts, reused, LogprobsTensors(*likeliest, marks, rows.cu.tolist()))


def _uploaded(
    rows: DeviceRows, batch: BatchSettings, proposals: RowProposals | None
) -> dict[str, torch.Tensor]:
    """Copy the parts of the layout that the step needs to the device, at once; a plain step needs none.

    `drafted` are the rows that were computed from drafts, `places` [n * longest] the row of each emitted token.
    Vectors [R] have each row's sample, its offset, the drafts of its sample, and, where samples differ in it,
    whether its log-probability is taken from the processed distribution. `residual` [n] is the proposals', if there
    are any.
    """
    vectors: dict[str, npt.NDArray[Any]] = {}
    processed = batch.processed_logprobs
    if processed.any() and not processed.all():
        vectors["processed"] = processed[rows.samples]
    if not rows.plain or proposals is not None:
        vectors["samples"], vectors["offsets"] = rows.samples, rows.offsets
        vectors["drafts"] = rows.drafted[rows.samples]
    if not rows.plain:
        width = int(np.diff(rows.cu).max())
        vectors["drafted"] = np.flatnonzero(rows.offsets)
        vectors["places"] = np.minimum(rows.cu[:-1, None] + np.arange(width), rows.cu[-1] - 1).reshape(-1)
    if proposals is not None:
        vectors["residual"] = proposals.residual.numpy()
    return rows.put_all(**vectors)


def _marks(
    rows: DeviceRows, counts: torch.Tensor, reused: torch.Tensor, there: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the mark of each row, [R] int32, for `counts` emitted and `reused` tokens of each sample, [n]."""
    if "offsets" not in there:
        # Nothing was drafted, and nothing proposed.
        return torch.zeros(len(rows.samples), dtype=torch.int32, device=rows.device)
    samples, offsets = there["samples"], there["offsets"]
    # All emitted tokens of a sample except the last are drafts.
    accepted = offsets < counts[samples] - 1
    return pack_rows(there["drafts"], accepted, offsets < reused[samples])


def _logprobs(
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    rows: DeviceRows,
    batch: BatchSettings,
    drawn: Sampled,
    tokens: torch.Tensor,
    there: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token of each row and the likeliest ones [R, 1 + k] int32, and their log-probabilities."""
    if "processed" in there:
        values = torch.where(there["processed"], drawn.processed, drawn.logprobs)
    else:
        values = drawn.processed if batch.processed_logprobs.all() else drawn.logprobs
    top, top_values = tokens.unsqueeze(1), values.unsqueeze(1)
    tied = batch.near_ties
    most = max(int(batch.top_logprobs.max()), int(tied.any()))
    if most:
        best = _likeliest(logits, scores, rows, batch, drawn.lowest, most)
        if tied.any():
            _put_runners_up(best, logits, scores, rows, batch, drawn, tied)
        top, top_values = torch.cat((top, best[0]), 1), torch.cat((top_values, best[1]), 1)
    return top.to(torch.int32), top_values.float()


def _likeliest(
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    rows: DeviceRows,
    batch: BatchSettings,
    lowest: torch.Tensor | None,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens of rows, [R, most]: as many as the sample requests, then NO_TOKEN."""
    asked = batch.top_logprobs
    tokens = torch.full((len(rows.samples), most), NO_TOKEN, dtype=torch.int64, device=rows.device)
    values = torch.zeros((len(rows.samples), most), dtype=torch.float32, device=rows.device)
    for processed in (False, True):
        own = (batch.processed_logprobs == processed) & (asked > 0)
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
    top: tuple[torch.Tensor, torch.Tensor],
    logits: torch.Tensor,
    scores: torch.Tensor | None,
    rows: DeviceRows,
    batch: BatchSettings,
    drawn: Sampled,
    tied: npt.NDArray[np.bool_],
) -> None:
    """Put the runner-up of each row and its margin into the first column of `top`, for the samples in `tied`.

    Rows after the emitted ones get some token of the vocabulary; the engine cuts them off.
    """
    chosen = np.flatnonzero(tied[rows.samples])
    for begin, end in chunks(len(chosen), logits.shape[1]):
        index = chosen[begin:end]
        samples = rows.samples[index]
        there = rows.put_all(
            place=index,
            owner=samples,
            offset=rows.offsets[index],
            divisor=batch.divisor[samples],
            seeds=batch.seeds[samples],
            noisy=batch.temperature[samples] > 0,
        )
        place = there["place"]
        part = _scaled(logits if scores is None else scores, place, there["divisor"], drawn.lowest)
        positions = rows.positions[there["owner"]] + there["offset"]
        winners = drawn.tokens[place].clamp(min=0)
        found = runner_up(part, winners, there["seeds"], positions, there["noisy"])
        top[0][place, 0], top[1][place, 0] = found


def _scaled(
    scores: torch.Tensor, place: torch.Tensor, divisor: torch.Tensor, lowest: torch.Tensor | None
) -> torch.Tensor:
    """Return divided and masked logits of some rows, [m, V] float32."""
    part = scores[place].float()
    part /= divisor.unsqueeze(1)
    if lowest is not None:
        part.masked_fill_(part < lowest[place].unsqueeze(1), -torch.inf)
    return part
