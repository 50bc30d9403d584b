"""The token that comes second where one was drawn, and by how much it lost.

Coupled sampling draws the arg-max of logits / T plus noise. Another policy near this one draws another token only
where the second score is nearly the first, and then it is nearly always the second.
"""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.coupled_sampler.sample import sample
from kernels.coupled_sampler.uniforms import gumbels


def runner_up(
    values: torch.Tensor,
    winners: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    noisy: torch.Tensor,
    backend: Backend | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token with the second score of each row, and the margin by which it lost.

    Where there is no other token the winner is its own runner-up, and the margin is infinite.

    Args:
        values: [n, V] float32, logits / T after masks; the winners' entries are overwritten.
        winners: [n] int64, the tokens that were drawn.
        seeds: [n] int64, read as unsigned.
        positions: [n] int64, of the response.
        noisy: [n] bool; False for greedy rows, whose scores are logits. All vectors are where `values` are.
        backend: see kernels/backend.py.

    Returns:
        tokens [n] int64, margins [n] float32, at least 0.
    """
    n, places = len(values), winners.unsqueeze(1)
    best = values.gather(1, places).squeeze(1)
    values.scatter_(1, places, -torch.inf)
    drawn = sample(
        values,
        seeds,
        positions,
        noisy.to(torch.float32),
        torch.empty(0, dtype=torch.int64),
        torch.arange(n + 1),
        backend=backend,
    )
    there = drawn.tokens >= 0
    tokens = torch.where(there, drawn.tokens, winners)
    second = values.gather(1, tokens.unsqueeze(1)).squeeze(1)
    noise = gumbels(seeds, positions, winners) - gumbels(seeds, positions, tokens)
    margins = (best.double() - second) + torch.where(noisy, noise, torch.zeros_like(noise))
    return tokens, torch.where(there, margins.clamp(min=0), torch.inf).float()
