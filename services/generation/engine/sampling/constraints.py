"""Apply penalties and masks row by row: vLLM's own, and ours for min-p and min-tokens."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from services.generation.engine.grammars import apply_masks
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import Rows


class RowMasks(NamedTuple):
    """Masks of grammars, one bit a token, for each row of a step; `rows` are those that they apply to."""

    bits: torch.Tensor
    rows: list[int]


def temperatures(metadata: SamplingMetadata, n: int) -> torch.Tensor:
    """Return the temperature of each sample, [n] float32, where vLLM has them; 0 is greedy."""
    if metadata.all_greedy or metadata.temperature is None:
        return torch.zeros(n, dtype=torch.float32)
    return metadata.temperature[:n]  # type: ignore[no-any-return]


def constrain(
    raw: torch.Tensor,
    rows: Rows,
    metadata: SamplingMetadata,
    noise: list[SampleNoise],
    temperature: npt.NDArray[np.float32],
    masks: RowMasks | None = None,
) -> tuple[torch.Tensor, bool]:
    """Apply penalties and masks by row. Returns the logits and whether they were divided by temperature."""
    penalised = not metadata.no_penalties
    withheld = any(item.min_tokens for item in noise) and _withheld(rows, noise)
    limited = any(item.allowed for item in noise)
    masked = metadata.top_k is not None or metadata.top_p is not None or any(item.min_p for item in noise)
    if not (penalised or withheld or limited or masked or masks is not None):
        return raw, False
    logits = raw.clone()
    index = torch.from_numpy(rows.samples).to(logits.device)
    if penalised:
        logits = _penalise(logits, index, rows, metadata)
    for row, tokens in withheld or ():
        logits[row, tokens] = float("-inf")
    if limited:
        _limit(logits, rows, noise)
    if masks is not None:
        apply_masks(logits, masks.bits, masks.rows)
    if masked:
        _mask(logits, index, metadata, noise, temperature)
    return logits, masked


def _withheld(rows: Rows, noise: list[SampleNoise]) -> list[tuple[int, list[int]]]:
    """Return the rows that may not end their sample yet, with the tokens that would."""
    found = []
    positions = rows.row_positions
    for row, owner in enumerate(rows.samples):
        item = noise[owner]
        if item.forbidden and positions[row] < item.min_tokens:
            found.append((row, list(item.forbidden)))
    return found


def _limit(logits: torch.Tensor, rows: Rows, noise: list[SampleNoise]) -> None:
    """Mask all but the allowed tokens in the rows of samples that have some, in place."""
    limited = {row: noise[owner].allowed for row, owner in enumerate(rows.samples) if noise[owner].allowed}
    counts = [len(allowed) for allowed in limited.values()]
    index = np.fromiter(limited, np.int64, len(limited))
    row = torch.from_numpy(np.repeat(index, counts)).to(logits.device)
    tokens = np.fromiter(chain.from_iterable(limited.values()), np.int64, sum(counts))
    token = torch.from_numpy(tokens).to(logits.device)
    kept = logits[row, token]
    logits[torch.from_numpy(index).to(logits.device)] = float("-inf")
    logits[row, token] = kept


def _penalise(
    logits: torch.Tensor, index: torch.Tensor, rows: Rows, metadata: SamplingMetadata
) -> torch.Tensor:
    outputs: list[list[int]] = []
    for i in range(len(rows.cu) - 1):
        history, drafts = list(metadata.output_token_ids[i]), rows.drafts_of(i).tolist()
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
    """Divide by temperature, then apply min-p, top-k and top-p in vLLM's order, in place."""
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
