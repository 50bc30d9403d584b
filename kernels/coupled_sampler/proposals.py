"""Acceptance of proposed tokens by their probability: the specification, its reference, and its uniforms.

A row may have a proposed token d: a draft under standard speculative sampling, or a token of a cached rollout. It
is accepted iff p(d) > theta, with theta in (0, 1) from the caller: a uniform draw times the factor of the rule.
With x the logits of p, p(d) > theta iff

    sum over v != d of exp((x_v - x_d) + s) < 1,    s = ln(theta / (1 - theta)), the log-odds of theta

which takes one pass, and no maximum or sum of the row before it. So that every device decides alike, the
exponentials are the integer masses of reference.py (sums of integers have no order), of differences in float32 as
they are written here, none fused:

    accepted iff  sum over v != d of mass(min((x_v - x_d) + s, 0)) < mass(0) = 2**40, x_d is finite and kept, and
    s < +inf

A term that the minimum cuts off is at least 1 and rejects by itself. 2**22 entries of mass 2**40 stay below
2**63. Masses are 2**-40 apart and exponentials good to 1e-7, so p(d) is too, which is what rounding does to
logits.

A greedy row accepts only its arg-max. The proposals of a request are accepted up to the first rejection, or the
first row without a proposal; later rows are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.backend import check, check_device
from kernels.coupled_sampler.noise import KEY_STEPS, MULTIPLIERS, ROUNDS, Domain, Purpose
from kernels.coupled_sampler.reference import MASS_BITS, mass_of

_WORD = 0xFFFFFFFF


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Return `noise.uniform` for pairs of a seed and a position, exact in float64.

    Args:
        seeds: [n] int64, read as unsigned.
        positions: [n] int64, on the same device, in [0, 2**32).
        purpose: of the draws.
    """
    zero = torch.zeros_like(positions)
    counter = (zero, positions & _WORD, zero + Domain.UNIFORM, zero + purpose)
    word, *_ = _block(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    return (word.double() + 0.5) * 2.0**-32


def gumbels(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return `noise.gumbel` of one token each, [n] float64; it differs from the specified float32 by about 1e-6.

    Args:
        seeds: [n] int64, read as unsigned.
        positions: [n] int64, on the same device, in [0, 2**32).
        tokens: [n] int64, on the same device.
    """
    zero = torch.zeros_like(positions)
    counter = (tokens // 4, positions & _WORD, zero + Domain.TOKEN, zero)
    block = torch.stack(_block(counter, (seeds & _WORD, (seeds >> 32) & _WORD)), -1)
    word = block.gather(-1, (tokens % 4).unsqueeze(-1)).squeeze(-1)
    return -torch.log(-torch.log((word.double() + 0.5) * 2.0**-32))


def _block(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the four words of each block of Philox4x32-10: all words are int64 in [0, 2**32)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        # A product of two words wraps around to a negative number; its bits are right.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


NO_PROPOSAL = -1
LEAST = np.float32(-1e30)
"""Log-odds at which every kept token is accepted; finite, so that no sum with it is NaN."""


@dataclass(frozen=True, slots=True)
class RowProposals:
    """Proposed tokens of R rows, N requests. Tokens and log-odds may be in host memory or where the logits are.

    tokens    [R] int64; NO_PROPOSAL for a row without one
    log_odds  [R] float32, of the probability that the token's must exceed; +inf or NaN: it is rejected
    raw       [R] bool, in host memory: by the logits' own distribution, else by what is sampled from (edited,
              divided by T, masked)
    residual  [N] bool, in host memory: the request is sampled with noise of Domain.RESIDUAL, and a token that was
              rejected is left out of the row's sampling: max(p - q, 0) of a proposal that was certain (q = 1)
    """

    tokens: torch.Tensor
    log_odds: torch.Tensor
    raw: torch.Tensor
    residual: torch.Tensor

    def check(self, rows: int, requests: int, width: int, device: torch.device) -> None:
        """Raise ValueError for a wrong shape, dtype or device, or an invalid token in host memory."""
        check("proposals.tokens", self.tokens, (rows,), (torch.int64,))
        check("proposals.log_odds", self.log_odds, (rows,), (torch.float32,))
        check("proposals.raw", self.raw, (rows,), (torch.bool,))
        check("proposals.residual", self.residual, (requests,), (torch.bool,))
        host = torch.device("cpu")
        check_device(host, **{"proposals.raw": self.raw, "proposals.residual": self.residual})
        for name, vector in (("tokens", self.tokens), ("log_odds", self.log_odds)):
            if vector.device != host:
                check_device(device, **{f"proposals.{name}": vector})
        # Checking tokens on a device would wait for it.
        if not rows or self.tokens.device != host:
            return
        if int(self.tokens.min()) < NO_PROPOSAL or int(self.tokens.max()) >= width:
            raise ValueError(f"proposals.tokens must be {NO_PROPOSAL} or in 0..{width - 1}")


def log_odds(theta: torch.Tensor) -> torch.Tensor:
    """Return ln(theta / (1 - theta)) as float32, of float64: LEAST from 0 down, +inf from 1 up, NaN for NaN."""
    inside = theta.clamp(0, 1)
    return (inside.log() - (-inside).log1p()).float().clamp(min=float(LEAST))


def accepts(
    values: NDArray[np.float32], tokens: NDArray[np.int64], odds: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Return whether each row's distribution accepts its token, [m].

    Args:
        values: logits [m, V] of the distributions, -inf what is not kept.
        tokens: [m].
        odds: log-odds of what the tokens' probabilities must exceed, [m].
    """
    each = np.arange(len(values))
    own = values[each, tokens]
    with np.errstate(invalid="ignore", over="ignore"):
        against = mass_of(np.minimum((values - own[:, None]) + odds[:, None], np.float32(0)))
        possible = (own > -np.inf) & (own < np.inf) & (odds < np.inf)
    found: NDArray[np.bool_] = possible & (against.sum(axis=1) - against[each, tokens] < 1 << MASS_BITS)
    return found
