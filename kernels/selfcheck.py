"""Self-check of the kernels on the device at hand; the engine runs it before it serves.

A compiler that fuses an operation, or a device that rounds otherwise, would change tokens without an error
(noise.py states the requirements), and a wrong copy of KV would go unnoticed. Takes some seconds, mostly for
compilation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.backend import Backend, KernelMismatch
from kernels.coupled_sampler.noise import gumbel
from kernels.coupled_sampler.proposals import RowProposals
from kernels.coupled_sampler.sample import Edited, Sampled, sample
from kernels.kv_pack import pack, packed_shape, unpack
from kernels.short_query_attention.attend import attend, attend_reference
from kernels.short_query_attention.inputs import LONGEST_TREE, AttentionStep, ancestor_mask
from kernels.w4a16 import quantise

_WIDTH = 1500
"""Entries of a row: more than one block of noise, and not a multiple of it."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Three requests, of one, three and two rows."""

    logits: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    edited: Edited | None = None
    proposals: RowProposals | None = None

    def sampled(self, drafts: torch.Tensor, device: torch.device, backend: Backend) -> Sampled:
        """Return the samples of the case on a device."""
        return sample(
            self.logits.to(device),
            self.seeds.to(device),
            self.positions.to(device),
            self.temperature.to(device),
            drafts.to(device),
            torch.tensor([0, 1, 4, 6]),
            top_k=None if self.top_k is None else self.top_k.to(device),
            top_p=None if self.top_p is None else self.top_p.to(device),
            min_p=self.min_p,
            edited=None if self.edited is None else Edited(self.edited.rows, self.edited.logits.to(device)),
            proposals=self.proposals,
            backend=backend,
        )


def check_kernels(device: torch.device) -> None:
    """Raise KernelMismatch unless the kernels that any engine uses agree with their references on `device`.

    `check_attention` checks attention separately, for the shape of a model. Errors of kernels that do not compile
    or run are passed on.
    """
    check_sampler(device)
    check_w4a16(device)
    check_kv_pack(device)


def check_sampler(device: torch.device) -> None:
    """Raise KernelMismatch unless tokens, counts and log-probabilities on `device` match the CPU sampler's.

    Cases: rows of random logits, masked and not, with a correct draft in one request; rows whose scores almost tie,
    where one operation rounded differently is enough for another token; rows that are edited or accept proposals.
    """
    host = torch.device("cpu")
    for case in _cases():
        drafts = torch.tensor([11, 12, 13])
        drafts[0] = case.sampled(drafts, host, Backend.REFERENCE).tokens[1]
        expected = case.sampled(drafts, host, Backend.REFERENCE)
        found = case.sampled(drafts, device, Backend.TRITON)
        if not (
            torch.equal(found.tokens.cpu(), expected.tokens)
            and torch.equal(found.counts.cpu(), expected.counts)
            and torch.equal(found.reused.cpu(), expected.reused)
            and torch.allclose(found.logprobs.cpu(), expected.logprobs, rtol=1e-4, atol=1e-4, equal_nan=True)
        ):
            raise KernelMismatch(
                f"sampling on {device} gives tokens {found.tokens.tolist()}, "
                f"the reference {expected.tokens.tolist()}"
            )


def check_w4a16(device: torch.device) -> None:
    """Raise KernelMismatch unless 4-bit weights match the reference bit for bit."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 600, generator=generator).bfloat16()
    for symmetric in (True, False):
        expected = quantise(weight, symmetric=symmetric, backend=Backend.REFERENCE)
        found = quantise(weight.to(device), symmetric=symmetric, backend=Backend.TRITON)
        same = torch.equal(found.packed.cpu(), expected.packed) and torch.equal(
            found.scales.cpu(), expected.scales
        )
        if expected.zeros is not None and found.zeros is not None:
            same &= torch.equal(found.zeros.cpu(), expected.zeros)
        if not same:
            raise KernelMismatch(f"quantising on {device} gives other integers or scales than the reference")


def check_kv_pack(device: torch.device) -> None:
    """Raise KernelMismatch unless a request with a partial last block is packed and unpacked like the reference."""
    blocks, there, tokens = torch.tensor([7, 0, 3]), torch.tensor([2, 6, 1]), 37
    caches = [torch.arange(8 * 2 * 16 * 24).view(8, 2, 16, 24).to(torch.int16) + layer for layer in range(2)]
    packed, copies = [], []
    for place, backend in ((torch.device("cpu"), Backend.REFERENCE), (device, Backend.TRITON)):
        source = [cache.to(place) for cache in caches]
        buffer = torch.zeros(packed_shape(source, 3, tokens), dtype=torch.int16, device=place)
        pack(source, blocks, buffer, tokens=tokens, backend=backend)
        target = [torch.full_like(cache, -1) for cache in source]
        unpack(buffer, target, there, tokens=tokens, backend=backend)
        packed.append(buffer.cpu())
        copies.append(torch.stack(target).cpu())
    if not (torch.equal(*packed) and torch.equal(*copies)):
        raise KernelMismatch(f"KV that was packed and unpacked on {device} differs from the original")


def _cases() -> tuple[_Case, ...]:
    rng = np.random.default_rng(0)
    seeds, positions = torch.tensor([3, -4, 5]), torch.tensor([0, 7, 2**32 - 9])
    owner, offset = np.repeat(np.arange(3), (1, 3, 2)), np.array([0, 0, 1, 2, 0, 1])
    places = zip(seeds.numpy().view(np.uint64)[owner], positions.numpy()[owner] + offset, strict=True)
    noise = np.stack([gumbel(int(seed), int(position), _WIDTH) for seed, position in places])
    plain = torch.from_numpy(rng.normal(0, 3, (6, _WIDTH)).astype(np.float32))
    top_k, top_p = torch.tensor([0, 40, 1400]), torch.tensor([0.9, 1.0, 0.5])
    return (
        _Case(plain, seeds, positions, torch.tensor([1.0, 0.7, 0.0])),
        _Case(plain.bfloat16(), seeds, positions, torch.tensor([1.0, 0.7, 1.3]), top_k, top_p),
        _Case(torch.from_numpy(-noise), seeds, positions, torch.ones(3)),
        _with_proposals(plain, seeds, positions),
    )


def _with_proposals(plain: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> _Case:
    """Return a plain request, one with likely proposals, and one that is verified by rejection."""
    best = plain.argmax(dim=1)
    proposals = RowProposals(
        torch.tensor([-1, int(best[1]), int(best[2]), int(best[3]), 13, -1]),
        torch.tensor([0.0, -5.0, -3.0, 0.5, -1.0, 0.0]),
        torch.tensor([False, True, False, True, False, False]),
        torch.tensor([False, False, True]),
    )
    edited = Edited(torch.tensor([1, 4]), plain[[1, 4]] * 0.75)
    temperature = torch.tensor([1.0, 0.7, 1.3])
    min_p = torch.tensor([0.0, 0.001, 0.0])
    return _Case(plain, seeds, positions, temperature, min_p=min_p, edited=edited, proposals=proposals)


_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Allowed error of a result, as a share of the largest one."""


def check_attention(
    device: torch.device, heads: int, kv_heads: int, size: int, dtype: torch.dtype, trees: bool = False
) -> None:
    """Raise KernelMismatch unless attention of this shape agrees with the reference in float64 on `device`.

    Cases: requests that decode, verify a few drafts or as many as fit in a step, or have no query; contexts in one
    piece and in more; KV in vLLM's layout, with NaN wherever the kernel must not read. With `trees` also with a
    mask of ancestors, and drafts of the largest size of a mask. Errors of kernels that do not compile or run are
    passed on.
    """
    step = _attention(heads, kv_heads, size, dtype)
    cases = [step, replace(step, window=40)]
    if trees:
        cases += [
            _with_tree(step),
            _with_tree(_attention(heads, kv_heads, size, dtype, longest=LONGEST_TREE)),
        ]
    for host in cases:
        exact = attend_reference(host, torch.float64).double()
        found = attend(_moved(host, device), backend=Backend.TRITON).cpu().double()
        if not (found - exact).abs().max() <= _ROUNDING[dtype] * exact.abs().max():
            raise KernelMismatch(
                f"attention of {heads} heads of {size} over {kv_heads} on {device} is off by more than rounding"
            )


def _attention(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, longest: int = 16, block: int = 16
) -> AttentionStep:
    """Return a step of four requests whose blocks lie in the cache in reverse."""
    generator = torch.Generator().manual_seed(0)
    lengths, queries = torch.tensor([5, 600, 0, 31 + longest]), torch.tensor([5, 1, 0, longest])
    columns = -(-int(lengths.max()) // block)
    table = torch.arange(len(lengths) * columns).flip(0).view(len(lengths), columns)
    cache = torch.randn(table.numel(), kv_heads, block, 2 * size, generator=generator)
    filled = torch.zeros(table.numel(), block, dtype=torch.bool)
    for blocks, length in zip(table, lengths.tolist(), strict=True):
        filled[blocks] = (torch.arange(columns * block) < length).view(columns, block)
    cache = cache.masked_fill(~filled[:, None, :, None], torch.nan).to(dtype)
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    return AttentionStep(
        query=torch.randn(int(queries.sum()), heads, size, generator=generator).to(dtype),
        keys=keys,
        values=values,
        block_table=table.to(torch.int32),
        lengths=lengths.to(torch.int32),
        cu_queries=torch.nn.functional.pad(queries.cumsum(0), (1, 0)).to(torch.int32),
        longest_query=int(queries.max()),
        longest=int(lengths.max()),
        scale=size**-0.5,
    )


def _with_tree(step: AttentionStep) -> AttentionStep:
    """Return the step with trees in which two tokens are the children of each."""
    queries = step.cu_queries.diff().numpy()
    trees = {
        request: [(place - 1) // 2 - 1 for place in range(1, count)]
        for request, count in enumerate(queries.tolist())
        if count
    }
    return replace(step, tree=torch.from_numpy(ancestor_mask(queries, trees)))


def _moved(step: AttentionStep, device: torch.device) -> AttentionStep:
    """Return the step on a device; keys and values stay halves of one tensor, with its strides."""
    tensors = {
        name: getattr(step, name).to(device) for name in ("query", "block_table", "lengths", "cu_queries")
    }
    size = step.query.shape[-1]
    cache = torch.cat((step.keys, step.values), dim=-1).transpose(1, 2).contiguous().to(device)
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    tree = None if step.tree is None else step.tree.to(device)
    return replace(step, keys=keys, values=values, tree=tree, **tensors)
