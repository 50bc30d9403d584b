"""Report the tokens of a step: marks, likeliest tokens, runners-up, and scores of prompts.

Marks carry the drafted, accepted and reused tokens of a step. They take the place of vLLM's rank of each token,
which Paceline does not use. vLLM cuts marks, tokens and log-probabilities alike at a stop token and at the length
limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.coupled_sampler.sample import Edited, runner_up
from kernels.transfer import downloaded
from services.generation.engine.sampling.constraints import chunks
from services.generation.engine.sampling.inputs import BatchSettings
from services.generation.engine.sampling.rows import IntArray, Rows, put

FloatArray = npt.NDArray[np.float32]
FILLER = -1
"""Value that vLLM puts after a sample's last token in the matrix of sampled tokens."""
NO_TOKEN = -1
"""Placeholder where a sample requests fewer of the likeliest tokens than another sample of the step."""
ACCEPTED = 2
"""Bit in the mark of a token that is an accepted draft."""
# Rows of a prompt whose logits are in memory at once.
_ROWS = 128


# -- marks ------------------------------------------------------------------------------------------------


def pack(drafted: IntArray, accepted: IntArray, reused: IntArray, width: int) -> npt.NDArray[np.int32]:
    """Return the marks of n samples with `width` places each, [n * width].

    Args:
        drafted: number of draft tokens that the step verified, [n].
        accepted: number of accepted draft tokens, which come first among the emitted ones, [n].
        reused: number of tokens reused from a cached rollout, which come first among the emitted ones, [n].
        width: places of a sample.
    """
    place = np.arange(width)
    marks = 4 * drafted[:, None] + ACCEPTED * (place < accepted[:, None]) + (place < reused[:, None])
    return marks.reshape(-1).astype(np.int32)


def pack_rows(drafted: torch.Tensor, accepted: torch.Tensor, reused: torch.Tensor) -> torch.Tensor:
    """Return the marks of R rows, [R] int32, on the device of the arguments.

    Args:
        drafted: number of draft tokens that the step verified for the row's sample, [R].
        accepted: True if the row's token is an accepted draft, [R] bool.
        reused: True if the row's token was reused from a cached rollout, [R] bool.
    """
    return (4 * drafted + ACCEPTED * accepted + reused).to(torch.int32)


def unpack(marks: Sequence[int]) -> tuple[int, int, int]:
    """Return (drafted, accepted, reused) of one sample from the marks of its tokens; zeros without marks.

    The last two count only tokens that are left: there may have been more after a stop token.
    """
    if not marks or not (first := marks[0]):
        return 0, 0, 0
    if not first & 1:
        return first >> 2, marks.count(first) if first & ACCEPTED else 0, 0
    accepted = sum([mark & ACCEPTED for mark in marks]) // ACCEPTED
    return first >> 2, accepted, sum([mark & 1 for mark in marks])


def unpack_likeliest(logprobs: Any) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens of each position of one sample, and their log-probabilities, in order."""
    tokens = logprobs.logprob_token_ids
    if tokens.shape[1] == 1 or not len(tokens):
        return [], []
    wanted = slice(1, 1 + int((tokens[0, 1:] != NO_TOKEN).sum()))
    return tokens[:, wanted].ravel().tolist(), logprobs.logprobs[:, wanted].ravel().tolist()


def joined(scores: Sequence[Any]) -> tuple[list[float], list[int], bool]:
    """Return the log-probabilities and the marks of the tokens of all samples, in order.

    Joined because converting an array takes as long for one sample as for hundreds.

    Args:
        scores: vLLM's `LogprobsLists` of each sample, whose first column is of the sampled tokens.

    Returns:
        log-probabilities [tokens], marks [tokens], and True if some samples have likeliest tokens.
    """
    values, marks = [each.logprobs for each in scores], [each.sampled_token_ranks for each in scores]
    likeliest = any([each.shape[1] > 1 for each in values])
    if likeliest:
        values = [each[:, :1] for each in values]
    return _flat(values), _flat(marks), likeliest


def _flat(parts: Sequence[npt.NDArray[Any]]) -> list[Any]:
    """Return the entries of all parts, in order."""
    if not parts:
        return []
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    flat: list[Any] = whole.ravel().tolist()
    return flat


# -- scores of prompts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of all tokens of a prompt except the first, [n - 1], and the likeliest tokens there, [n - 1, k]."""

    logprobs: npt.NDArray[np.float32]
    top_token_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, tokens: int, most: int) -> PromptScores:
        """Allocate scores for a prompt of `tokens` tokens, with the `most` likeliest tokens of each position."""
        rows = max(0, tokens - 1)
        return cls(
            np.full(rows, np.nan, np.float32),
            np.zeros((rows, most), np.int64),
            np.zeros((rows, most), np.float32),
        )


@dataclass(slots=True)
class PromptReading:
    """Scores of one prompt, filled in while it is computed; `reported` once they have left the worker.

    A prompt is scored by the model's own distribution, a few rows at a time: the logits of a whole prompt would
    take gigabytes, which no memory budget includes.
    """

    prompt: list[int]
    most: int
    reported: bool = False
    scores: PromptScores = field(init=False)

    def __post_init__(self) -> None:
        self.scores = PromptScores.empty(len(self.prompt), self.most)

    def read(
        self, hidden: torch.Tensor, begin: int, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Score the tokens after the positions from `begin` on; `hidden` has the states there, [m, H]."""
        rows = min(len(hidden), len(self.prompt) - 1 - begin)
        for first in range(0, rows, _ROWS):
            last = min(first + _ROWS, rows)
            logits = logits_of(hidden[first:last]).float()
            place = slice(begin + first, begin + last)
            following = self.prompt[place.start + 1 : place.stop + 1]
            total = logits.logsumexp(dim=-1, keepdim=True)
            index = torch.tensor(following, device=logits.device).unsqueeze(1)
            self.scores.logprobs[place] = (logits.gather(1, index) - total).squeeze(1).cpu().numpy()
            if self.most:
                best = logits.topk(self.most, dim=-1)
                self.scores.top_token_ids[place] = best.indices.cpu().numpy()
                self.scores.top_logprobs[place] = (best.values - total).cpu().numpy()


# -- likeliest tokens and runners-up ----------------------------------------------------------------------


def likeliest(
    logits: torch.Tensor,
    rows: Rows,
    counts: IntArray,
    batch: BatchSettings,
    edited: Edited | None,
    lowest: torch.Tensor | None,
) -> tuple[IntArray, FloatArray]:
    """Return the likeliest tokens of emitted rows and their log-probabilities, [R, K]; K is the most requested.

    They are of the model's own distribution or of the one that is sampled from, as the sample requests. NO_TOKEN
    fills the places after the number it requests. Rows are widened to float32 a few at a time.

    Args:
        logits: logits [R, V], any float type.
        rows: layout of the step.
        counts: number of emitted tokens of each sample, [n].
        batch: settings of the samples.
        edited: logits from which some rows are sampled instead.
        lowest: lowest scaled logit that is kept in each row, [R]; None if all are.
    """
    asked = batch.top_logprobs
    most = int(asked.max(initial=0))
    samples = rows.samples
    tokens, values = (
        np.full((len(samples), most), NO_TOKEN, np.int64),
        np.zeros((len(samples), most), np.float32),
    )
    if not most:
        return tokens, values
    by_processed = batch.processed_logprobs[samples]
    wanted = (asked[samples] > 0) & (rows.offsets < counts[samples])
    found: list[tuple[IntArray, torch.Tensor, torch.Tensor]] = []
    for chosen, processed in ((wanted & by_processed, True), (wanted & ~by_processed, False)):
        index = np.flatnonzero(chosen)
        for begin, end in chunks(len(index), logits.shape[1]):
            part = index[begin:end]
            if processed:
                own = sampled_from(logits, part, batch.divisor[samples[part]], edited, lowest)
            else:
                own = logits[put(logits.device, part=part)["part"]].float()
            best = own.topk(most, dim=-1)
            found.append((part, best.indices, best.values - own.logsumexp(dim=-1, keepdim=True)))
    if found:
        # One wait for the device, after all parts are computed.
        index = np.concatenate([part for part, _, _ in found])
        best_tokens, best_values = (downloaded(torch.cat([each[k] for each in found])) for k in (1, 2))
        beyond = np.arange(most) >= asked[samples[index], None]
        tokens[index] = np.where(beyond, NO_TOKEN, best_tokens.numpy())
        values[index] = best_values.numpy()
    return tokens, values


def sampled_from(
    logits: torch.Tensor,
    index: IntArray,
    divisor: FloatArray,
    edited: Edited | None,
    lowest: torch.Tensor | None,
) -> torch.Tensor:
    """Return edited logits of some rows, divided by `divisor` [m] and masked, [m, V] float32."""
    vectors: dict[str, npt.NDArray[Any]] = {"index": index, "divisor": divisor}
    if edited is not None:
        numbers = edited.rows.numpy()
        place = np.minimum(np.searchsorted(numbers, index), len(numbers) - 1)
        vectors["mine"] = np.flatnonzero(numbers[place] == index)
        vectors["place"] = place[vectors["mine"]]
    there = put(logits.device, **vectors)
    values = logits[there["index"]].float()
    if edited is not None:
        values[there["mine"]] = edited.logits[there["place"]]
    values /= there["divisor"].unsqueeze(1)
    if lowest is None:
        return values
    return values.masked_fill_(values < lowest[there["index"]].unsqueeze(1), -torch.inf)


def with_runners_up(
    top: tuple[IntArray, FloatArray],
    logits: torch.Tensor,
    rows: Rows,
    drawn: tuple[IntArray, IntArray],
    batch: BatchSettings,
    edited: Edited | None,
    lowest: torch.Tensor | None,
) -> tuple[IntArray, FloatArray]:
    """Return `top` with the runner-up and its margin in the first column, for samples that request near-ties.

    Such samples do not request likeliest tokens, whose places these take.

    Args:
        top: likeliest tokens of the rows and their values, [R, K] each.
        logits: logits [R, V], any float type.
        rows: layout of the step.
        drawn: token of each row [R], and number of emitted tokens of each sample [n].
        batch: settings of the samples.
        edited: logits from which some rows are sampled instead.
        lowest: lowest scaled logit that is kept in each row, [R]; None if all are.
    """
    asked = batch.near_ties
    if not asked.any():
        return top
    winners, counts = drawn
    tokens, values = top
    if not tokens.shape[1]:
        tokens, values = (
            np.full((len(winners), 1), NO_TOKEN, np.int64),
            np.zeros((len(winners), 1), np.float32),
        )
    wanted = asked[rows.samples] & (rows.offsets < counts[rows.samples]) & (winners >= 0)
    index = np.flatnonzero(wanted)
    found = list[tuple[torch.Tensor, torch.Tensor]]()
    for begin, end in chunks(len(index), logits.shape[1]):
        part = index[begin:end]
        samples = rows.samples[part]
        scaled = sampled_from(logits, part, batch.divisor[samples], edited, lowest)
        there = put(
            logits.device,
            winners=winners[part],
            seeds=batch.seeds[samples],
            positions=rows.row_positions[part],
            noisy=batch.temperature[samples] > 0,
        )
        found.append(runner_up(scaled, there["winners"], there["seeds"], there["positions"], there["noisy"]))
    if found:
        tokens[index, 0] = downloaded(torch.cat([each[0] for each in found])).numpy()
        values[index, 0] = downloaded(torch.cat([each[1] for each in found])).numpy()
    return tokens, values
