"""Coupled sampling of a step where the logits are: masks, noise, arg-max, log-probabilities and verification.

    sampled = sample(logits, seeds, positions, temperature, drafts, cu_rows, top_p=top_p)

On CUDA two kernels do it (more before them where there are masks) and no noise, probability or mask tensor is ever
in memory; elsewhere masks.py, cpu.py and torch. Both give the same tokens, to the bit; log-probabilities agree to
about 1e-5. What comes from host memory goes to the device in one copy, which nobody waits for, and `to_host` brings
the result back in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.backend import Backend, choose
from kernels.checks import FLOATS, INTEGERS, check, check_contiguous, check_device
from kernels.coupled_sampler.masks import MOST_ENTRIES, thresholds
from kernels.coupled_sampler.noise import Domain
from kernels.coupled_sampler.reference import coupled_argmax_reference
from kernels.coupled_sampler.verify import UNSAMPLED, check_ragged, verify
from kernels.transfer import Layout, downloaded, layout_of, uploaded, views


@dataclass(frozen=True, slots=True)
class Sampled:
    """R rows, N requests: request n emits tokens[cu_rows[n] : cu_rows[n] + counts[n]].

    tokens     [R] int64; UNSAMPLED behind the emitted ones, INVALID where nothing could be sampled
    counts     [N] int64, accepted drafts + 1
    logprobs   [R] float32: log-softmax of the logits at the token; NaN where there is none
    processed  [R] float32: the same of logits / T (T = 0: of the logits) among the entries that the masks keep
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    logprobs: torch.Tensor
    processed: torch.Tensor
    memory: torch.Tensor | None = None
    """The block that all four lie in, if they do, uint8."""

    def to_host(self) -> Sampled:
        """Return the same in host memory, by one copy; waits for the device."""
        if self.memory is None:
            return self
        memory = downloaded(self.memory)
        layout, _ = _outputs(len(self.tokens), len(self.counts))
        return Sampled(**views(memory, layout), memory=memory)


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    drafts: torch.Tensor,
    cu_rows: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    domain: Domain = Domain.TOKEN,
    backend: Backend | str | None = None,
) -> Sampled:
    """Sample the target's tokens and verify drafts, as cpu.coupled_verify does.

    Args:
        logits: [R, V] float32, bfloat16 or float16, V up to 2**22, the last axis contiguous. -inf never wins.
        seeds: [N] int64, read as unsigned. Seeds, positions, temperature and drafts may each be on the device of
        the
            logits or in host memory.
        positions: [N] int64, of the first row of each request.
        temperature: [N] float32; 0 is greedy, without noise or masks.
        drafts: [R - N] int64, one request after the other.
        cu_rows: [N + 1] int64 in host memory: request n has rows cu_rows[n] : cu_rows[n + 1], one for each draft
            and one more.
        top_k: [N] int64; below 1 or not below V is off. masks.py has the rules.
        top_p: [N] float32; off unless below 1.
        domain: of the noise.
        backend: see kernels/backend.py.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    requests = len(cu_rows) - 1
    check("logits", logits, (None, None), FLOATS)
    check_contiguous(logits=logits)
    if not 1 <= logits.shape[1] <= MOST_ENTRIES:
        raise ValueError(f"logits must have 1..{MOST_ENTRIES} columns, got {logits.shape[1]}")
    check("cu_rows", cu_rows, (None,), (torch.int64,))
    check_device(torch.device("cpu"), cu_rows=cu_rows)
    check("drafts", drafts, (None,), (torch.int64,))
    check_ragged(len(logits), len(drafts), cu_rows.numpy())
    check("seeds", seeds, (requests,), (torch.int64,))
    check("positions", positions, (requests,), (torch.int64,))
    check("temperature", temperature, (requests,), (torch.float32,))
    vectors = {"seeds": seeds, "positions": positions, "temperature": temperature, "drafts": drafts}
    host = torch.device("cpu")
    for name, vector in vectors.items():
        if vector.device != host:
            check_device(logits.device, **{name: vector})
    if top_k is not None:
        check("top_k", top_k, (requests,), INTEGERS)
    if top_p is not None:
        check("top_p", top_p, (requests,), (torch.float32,))
    check_device(logits.device, top_k=top_k, top_p=top_p)
    if choose(logits.device, backend) is not Backend.TRITON:
        return sample_reference(logits, **vectors, cu_rows=cu_rows, top_k=top_k, top_p=top_p, domain=domain)
    from kernels.coupled_sampler.triton_sample import sample_triton

    vectors["first_rows"] = cu_rows
    vectors["owners"] = torch.repeat_interleave(torch.arange(requests), cu_rows.diff())
    layout, size = _outputs(len(logits), requests)
    memory = torch.empty(size, dtype=torch.uint8, device=logits.device)
    there = {name: vector.contiguous() for name, vector in uploaded(vectors, logits.device).items()}
    sample_triton(logits, there, top_k, top_p, views(memory, layout), domain)
    return Sampled(**views(memory, layout), memory=memory)


def _outputs(rows: int, requests: int) -> tuple[Layout, int]:
    return layout_of(
        tokens=(rows, torch.int64),
        counts=(requests, torch.int64),
        logprobs=(rows, torch.float32),
        processed=(rows, torch.float32),
    )


def sample_reference(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    drafts: torch.Tensor,
    cu_rows: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    domain: Domain,
) -> Sampled:
    """`sample` by the CPU's sampler, with masks by numpy; arguments checked by the caller."""
    device = logits.device
    values = logits.detach().float().cpu().numpy()
    t = temperature.cpu().numpy()
    owner = np.repeat(np.arange(len(t)), np.diff(cu_rows.numpy()))
    kept, divisor = values, np.where((t > 0) & (t < np.inf), t, np.float32(1))[owner, None]
    if top_k is not None or top_p is not None:
        k = np.zeros(len(t), np.int64) if top_k is None else top_k.cpu().numpy()
        p = np.ones(len(t), np.float32) if top_p is None else top_p.cpu().numpy()
        with np.errstate(over="ignore", under="ignore"):
            lowest = thresholds(values / divisor, np.where(t > 0, k, 0)[owner], np.where(t > 0, p, 1)[owner])
            kept = np.where(values / divisor < lowest[:, None], np.float32(-np.inf), values)
    tokens, counts = _verified(
        np.ascontiguousarray(kept), seeds.cpu().numpy(), positions.cpu().numpy(), t,
        drafts.cpu().numpy(), cu_rows.numpy(), domain,
    )  # fmt: skip
    found = torch.from_numpy(tokens)
    return Sampled(
        found.to(device),
        torch.from_numpy(counts).to(device),
        _logprobs(torch.from_numpy(values), found).to(device),
        _logprobs(torch.from_numpy(kept) / torch.from_numpy(divisor), found).to(device),
    )


def _verified(
    logits: NDArray[np.float32],
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    temperature: NDArray[np.float32],
    drafts: NDArray[np.int64],
    cu_rows: NDArray[np.int64],
    domain: Domain,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens [R] and counts [N] by the CPU's sampler, or by the definition where there is no numba."""
    if find_spec("numba") is not None:
        # Compiles or loads its code, which a process that samples on CUDA is spared.
        from kernels.coupled_sampler.cpu import coupled_verify

        return coupled_verify(logits, seeds, positions, temperature, drafts, cu_rows, domain=domain)
    each = np.diff(cu_rows)
    owner = np.repeat(np.arange(len(each)), each)
    place = np.arange(len(owner)) - cu_rows[owner]
    tokens = coupled_argmax_reference(
        logits, seeds.view(np.uint64)[owner], positions[owner] + place, temperature[owner], domain
    )
    counts = verify(tokens, drafts, cu_rows)
    return np.where(place < counts[owner], tokens, UNSAMPLED), counts


def _logprobs(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-softmax of each row at its token; NaN where there is none."""
    chosen = values.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1) - values.logsumexp(dim=-1)
    return torch.where(tokens >= 0, chosen, torch.nan)
