"""Uniforms, and the noise of single tokens, of noise.py for many samples and positions, on their device."""

import torch

from kernels.coupled_sampler.noise import Domain, Purpose
from kernels.coupled_sampler.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

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
