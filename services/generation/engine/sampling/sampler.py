"""Sample tokens from logits: vLLM's masks and penalties, then the coupled arg-max with verification.

One row of logits is one position of one sample. A sample with k draft tokens has k + 1 rows, in order: row j
was computed with the first j draft tokens in place, so it is the target's distribution after them. Plain
decoding is the case k = 0 for every sample; there is no other code path, and that is what makes speculation on
and off agree token for token (DESIGN section 4). In the same step samples may ask for rejection instead, or take
over tokens of a cached rollout before the coupled sampling of the rows behind those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.metadata import SamplingMetadata

from kernels.coupled_sampler.cpu import coupled_verify
from kernels.coupled_sampler.verify import UNSAMPLED
from services.generation.engine.marks import NO_TOKEN
from services.generation.engine.sampling import device_sampler
from services.generation.engine.sampling.constraints import RowMasks, constrain, temperatures
from services.generation.engine.sampling.lenient import candidates, taken_over
from services.generation.engine.sampling.noise import CachedRollout, SampleNoise
from services.generation.engine.sampling.rejection import rejection_verify
from services.generation.engine.sampling.rows import IntArray, Rows
from services.generation.engine.types import Verifier


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens of a step: sample i emits `counts[i]` tokens, `tokens[cu[i] : cu[i] + counts[i]]`.

    `logprobs` [R] is filled for emitted rows. NaN marks a row from which nothing could be sampled. The first
    `reused[i]` tokens are taken over from a cached rollout. `top_tokens` and `top_logprobs` [R, K] have the
    likeliest tokens of emitted rows, as many as the sample asks for, then NO_TOKEN.
    """

    tokens: IntArray
    counts: IntArray
    reused: IntArray
    logprobs: npt.NDArray[np.float32]
    top_tokens: IntArray
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Scores:
    """Logits of a step: raw, and processed by penalties and masks; `divided` if divided by temperature."""

    raw: torch.Tensor
    processed: torch.Tensor
    divided: bool
    temperature: npt.NDArray[np.float32]
    # Which samples ask for log-probabilities of the processed ones, [n].
    by_processed: npt.NDArray[np.bool_]

    @property
    def divisor(self) -> npt.NDArray[np.float32]:
        """Remaining divisor of the processed logits, [n]; 0 is greedy."""
        if not self.divided:
            return self.temperature
        return np.where(self.temperature > 0, np.float32(1), np.float32(0)).astype(np.float32)

    def logprobs(self, index: IntArray, samples: IntArray, tokens: IntArray) -> npt.NDArray[np.float32]:
        """Return the log-probability of one token per row, raw or processed as its sample asks; all [m]."""
        result = _chosen_logprobs(self.raw, index, tokens)
        wanted = np.flatnonzero(self.by_processed[samples])
        if len(wanted):
            part = self._sampled_from(index[wanted], samples[wanted])
            result[wanted] = _chosen_logprobs(part, np.arange(len(wanted)), tokens[wanted])
        return result

    def likeliest(
        self, index: IntArray, samples: IntArray, most: int
    ) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Return the `most` likeliest tokens of each row, raw or processed as its sample asks; [m, most]."""
        found, values = np.empty((len(index), most), np.int64), np.empty((len(index), most), np.float32)
        for chosen in (self.by_processed[samples], ~self.by_processed[samples]):
            if not chosen.any():
                continue
            if self.by_processed[samples[chosen][0]]:
                part = self._sampled_from(index[chosen], samples[chosen])
            else:
                part = self.raw[torch.from_numpy(index[chosen]).to(self.raw.device)]
            best = part.topk(most, dim=-1)
            found[chosen] = best.indices.cpu().numpy()
            values[chosen] = _numpy(best.values - part.logsumexp(dim=-1, keepdim=True))
        return found, values

    def _sampled_from(self, index: IntArray, samples: IntArray) -> torch.Tensor:
        """Return the processed logits of some rows, divided by temperature, [m, V]."""
        part = self.processed[torch.from_numpy(index).to(self.processed.device)]
        if self.divided:
            return part
        divisor = np.where(self.temperature > 0, self.temperature, 1).astype(np.float32)
        return part / torch.from_numpy(divisor[samples]).to(part.device).unsqueeze(1)

    def choice(
        self, index: IntArray, samples: IntArray, tokens: IntArray
    ) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """Return whether each row's token may be sampled, and the arg-max of greedy rows; [m] each."""
        device = self.processed.device
        places = (torch.from_numpy(index).to(device), torch.from_numpy(tokens).to(device))
        allowed = (self.processed[places] > -torch.inf).cpu().numpy()
        best = np.full(len(index), -1, np.int64)
        greedy = np.flatnonzero(self.temperature[samples] == 0)
        if len(greedy):
            # numpy's takes the first of equals, as the coupled sampler does.
            best[greedy] = _numpy(self.processed[places[0][greedy]]).argmax(axis=1)
        return allowed, best


@dataclass(frozen=True, slots=True)
class _Taken:
    """Tokens reused from cached rollouts: the first `count` [n] of each sample, m in all.

    `live` [n]: the sample has a row behind those to sample from. `row`, `token`, `now` (its log-probability under
    the current policy): [m].
    """

    count: IntArray
    live: npt.NDArray[np.bool_]
    row: IntArray
    token: IntArray
    now: npt.NDArray[np.float32]

    @classmethod
    def nothing(cls, n: int) -> _Taken:
        """Return that nothing is reused, for n samples."""
        none = np.empty(0, np.int64)
        return cls(np.zeros(n, np.int64), np.ones(n, bool), none, none, np.empty(0, np.float32))


def sample(
    logits: torch.Tensor,
    rows: Rows,
    metadata: SamplingMetadata,
    noise: list[SampleNoise],
    followed: Mapping[int, CachedRollout],
    masks: RowMasks | None = None,
) -> Verified:
    """Verify the drafts and sample the next token of every sample.

    Args:
        logits: [R, V], any float type; left as it is.
        rows: the layout.
        metadata: vLLM's sampling parameters, a row per sample.
        noise: one per sample.
        followed: by its index, the cached rollout of each sample that has taken over all its tokens so far.
        masks: of the rows of samples that follow a grammar.
    """
    by_processed = np.fromiter((item.processed_logprobs for item in noise), bool, len(noise))
    on_device = not followed and device_sampler.samples_on(logits.device, noise)
    if on_device and device_sampler.only_masked(metadata, noise):
        # Temperatures stay where they are: to read them here would wait for the forward pass.
        drawn = device_sampler.draw(logits, rows, temperatures(metadata, len(noise)), noise, metadata)
        logprobs = np.where(by_processed[rows.samples], drawn.processed, drawn.logprobs)
        reused, top = np.zeros(len(noise), np.int64), _no_likeliest(len(logits))
        return Verified(drawn.tokens, drawn.counts, reused, logprobs, *top)
    temperature = temperatures(metadata, len(noise)).cpu().numpy()
    raw = logits.float()
    processed, divided = constrain(raw, rows, metadata, noise, temperature, masks)
    scores = _Scores(raw, processed, divided, temperature, by_processed)
    taken = _take_over(scores, rows, noise, followed) if followed else None
    if on_device:
        drawn = device_sampler.draw(processed, rows, torch.from_numpy(scores.divisor), noise)
        tokens, counts = drawn.tokens, drawn.counts
    else:
        tokens, counts = _verify(_numpy(processed), rows, scores.divisor, noise, taken)
    logprobs = _logprobs(scores, rows, tokens, counts, taken)
    reused = np.zeros(len(noise), np.int64) if taken is None else taken.count
    return Verified(tokens, counts, reused, logprobs, *_likeliest(scores, rows, counts, noise))


def _take_over(
    scores: _Scores, rows: Rows, noise: list[SampleNoise], followed: Mapping[int, CachedRollout]
) -> _Taken:
    found = candidates(rows, followed)
    owner = rows.samples[found.row]
    now = scores.logprobs(found.row, owner, found.token)
    allowed, best = scores.choice(found.row, owner, found.token)
    count = taken_over(rows, found, now, allowed, best, _seeds(noise), scores.temperature)
    kept = rows.offsets[found.row] < count[owner]
    live = (count < found.count) | found.beyond
    return _Taken(count, live, found.row[kept], found.token[kept], now[kept])


def _verify(
    logits: npt.NDArray[np.float32],
    rows: Rows,
    temperature: npt.NDArray[np.float32],
    noise: list[SampleNoise],
    taken: _Taken | None,
) -> tuple[IntArray, IntArray]:
    """Return (tokens [R], emitted tokens [n]), with each sample's own verifier behind its reused tokens."""
    seeds = _seeds(noise)
    by_rejection = np.fromiter((item.verifier is Verifier.REJECTION for item in noise), bool, len(noise))
    if taken is None:
        if not by_rejection.any():
            return coupled_verify(logits, seeds, rows.positions, temperature, rows.drafts, rows.cu)
        taken = _Taken.nothing(len(noise))
    tokens, counts = np.full(len(logits), UNSAMPLED, np.int64), taken.count.copy()
    tokens[taken.row] = taken.token
    for verify, chosen in ((rejection_verify, by_rejection), (coupled_verify, ~by_rejection & taken.live)):
        if not chosen.any():
            continue
        index, part = rows.part(chosen, taken.count)
        tokens[index], more = verify(
            logits[index], seeds[chosen], part.positions, temperature[chosen], part.drafts, part.cu
        )
        counts[chosen] += more
    return tokens, counts


def _logprobs(
    scores: _Scores, rows: Rows, tokens: IntArray, counts: IntArray, taken: _Taken | None
) -> npt.NDArray[np.float32]:
    """Return the log-probability of every emitted token, raw or processed as its sample asks; [R]."""
    samples = rows.samples
    offsets = np.arange(len(samples)) - rows.cu[:-1][samples]
    emitted = offsets < counts[samples]
    result = np.full(len(samples), np.nan, np.float32)
    if taken is not None:
        result[taken.row] = taken.now
        emitted &= offsets >= taken.count[samples]
    index = np.flatnonzero(emitted)
    result[index] = scores.logprobs(index, samples[index], tokens[index])
    return result


def _likeliest(
    scores: _Scores, rows: Rows, counts: IntArray, noise: list[SampleNoise]
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Return the likeliest tokens of emitted rows and their log-probabilities, [R, K]; K is the most asked for."""
    asked = np.fromiter((item.top_logprobs for item in noise), np.int64, len(noise))
    most = int(asked.max(initial=0))
    tokens, values = _no_likeliest(len(rows.samples), most)
    if most:
        samples = rows.samples
        index = np.flatnonzero((asked[samples] > 0) & (rows.offsets < counts[samples]))
        found, logprobs = scores.likeliest(index, samples[index], most)
        beyond = np.arange(most) >= asked[samples[index], None]
        tokens[index] = np.where(beyond, NO_TOKEN, found)
        values[index] = logprobs
    return tokens, values


def _no_likeliest(rows: int, most: int = 0) -> tuple[IntArray, npt.NDArray[np.float32]]:
    return np.full((rows, most), NO_TOKEN, np.int64), np.zeros((rows, most), np.float32)


def _seeds(noise: list[SampleNoise]) -> npt.NDArray[np.uint64]:
    return np.fromiter((item.seed for item in noise), np.uint64, len(noise))


def _numpy(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().cpu().contiguous().numpy()  # type: ignore[no-any-return]


def _chosen_logprobs(logits: torch.Tensor, index: IntArray, tokens: IntArray) -> npt.NDArray[np.float32]:
    """Return the log-softmax of some rows at one token each; NaN for rows without a token (negative)."""
    part = logits
    if len(index) != len(logits):
        part = logits[torch.from_numpy(index).to(logits.device)]
    # Any entry will do where there is no token: the log-probability becomes NaN anyhow.
    chosen = torch.from_numpy(tokens).clamp(min=0).to(logits.device)
    values = part.gather(1, chosen.unsqueeze(1)).squeeze(1) - part.logsumexp(dim=-1)
    result = _numpy(values)
    result[tokens < 0] = np.nan
    return result
