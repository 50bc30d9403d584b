"""Check results on the device, bit for bit if they decide a token, otherwise within rounding; and compiled code.

All checks compare with plain numpy and torch. A check returns nothing. It raises `KernelMismatch`, or the error of
a kernel that does not compile or run. Compiled code is checked for registers, spills, captures in CUDA graphs, and
compilation while serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu.kernels import cases
from kernels.backend import KernelMismatch
from kernels.coupled_sampler.noise import gumbel
from kernels.coupled_sampler.reference import floors
from kernels.coupled_sampler.reference import thresholds as specified
from kernels.coupled_sampler.sample import sample
from kernels.selfcheck import check_attention, check_kv_pack, check_sampler, check_w4a16
from kernels.short_query_attention.attend import attend_reference
from kernels.short_query_attention.inputs import Scratch
from kernels.short_query_attention.race import attending, random_step
from kernels.tuning import tuning

Check = Callable[[torch.device, cases.Sizes], None]
_SEED, _POSITION = 0x0123456789ABCDEF, 7
_NEAR_TIES = 1024
"""Columns of a row whose scores nearly tie; the number of rows is the number of tokens to check."""


def noise(device: torch.device, sizes: cases.Sizes) -> None:
    """Compare g of millions of tokens with the specification's, by both kinds of product."""
    from bench.gpu.kernels.philox import noise_of

    expected = gumbel(_SEED, _POSITION, sizes.noise)
    for wide in (True, False):
        found = noise_of(_SEED, _POSITION, sizes.noise, device, wide).cpu().numpy()
        wrong = np.flatnonzero(found.view(np.int32) != expected.view(np.int32))
        if len(wrong):
            raise KernelMismatch(
                f"g of {len(wrong)} of {sizes.noise} tokens is not the specification's (wide products: {wide}); "
                f"token {wrong[0]}: {found[wrong[0]]!r}, not {expected[wrong[0]]!r}"
            )


def masks(device: torch.device, sizes: cases.Sizes) -> None:
    """Compare thresholds of whole rows with the specification's bit for bit, ties and masked entries included."""
    from kernels.coupled_sampler.triton_sample import LogitPart, thresholds

    rng = np.random.default_rng(1)
    rows, width = 12 if device.type == "cuda" else 3, sizes.vocabulary
    logits = rng.normal(0, rng.choice([0.5, 4.0, 12.0], (rows, 1)), (rows, width)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1, rng.random(width) < 0.9] = -np.inf
    temperature = rng.choice(np.array([0.7, 1.0, 1.3], np.float32), rows)
    top_k = rng.choice(np.array([0, 1, 50, width - 1]), rows)
    top_p = rng.choice(np.array([0.0, 0.5, 0.95, 1.0], np.float32), rows)
    lowest = torch.empty(rows, dtype=torch.float32, device=device)
    floor = floors(rng.choice(np.array([0.0, 1e-3, 0.3], np.float32), rows))
    given = {
        "top_k": top_k,
        "top_p": top_p,
        "floors": floor,
        "temperature": temperature,
        "owners": np.arange(rows),
    }
    vectors = {name: torch.from_numpy(vector).to(device) for name, vector in given.items()}
    part = LogitPart(torch.from_numpy(logits).to(device), vectors["owners"], vectors["owners"])
    thresholds([part], vectors, lowest)
    expected = specified(logits / temperature[:, None], top_k, top_p, floor)
    found = lowest.cpu().numpy()
    if not np.array_equal(found, expected):
        raise KernelMismatch(f"thresholds are {found.tolist()}, not {expected.tolist()}")


def near_ties(device: torch.device, sizes: cases.Sizes) -> None:
    """Compare tokens of rows whose scores nearly tie: one operation rounded otherwise gives another token."""
    rows = max(4, sizes.noise // _NEAR_TIES // 16)
    positions = torch.arange(rows)
    drawn = np.stack([gumbel(_SEED, position, _NEAR_TIES) for position in range(rows)])
    logits = torch.from_numpy(-drawn)
    expected = (logits.numpy() + drawn).argmax(axis=1)
    seeds = torch.full((rows,), _SEED)
    found = sample(
        logits.to(device),
        seeds,
        positions,
        torch.ones(rows),
        seeds[:0],
        torch.arange(rows + 1),
        backend="triton",
    )
    wrong = np.flatnonzero(found.tokens.cpu().numpy() != expected)
    if len(wrong):
        raise KernelMismatch(
            f"{len(wrong)} of {rows} tokens of near ties are wrong, the first at row {wrong[0]}"
        )


def engine_checks(device: torch.device, sizes: cases.Sizes) -> None:
    """Run the checks that an engine runs before it serves; in the interpreter only the quick ones."""
    if device.type == "cuda":
        check_sampler(device)
    check_w4a16(device)
    check_kv_pack(device)


def loss(device: torch.device, sizes: cases.Sizes) -> None:
    """Compare the distillation loss and its gradient with the reference's, within rounding."""
    from kernels.kd_loss import kd_loss

    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, sizes.vocabulary, generator=generator)
    weights, results = torch.tensor([1.0, 0.0, -2.0]), []
    for place, backend in ((device, "triton"), (torch.device("cpu"), "reference")):
        own = student.to(place).requires_grad_()
        made = kd_loss(own, teacher.to(place), weights.to(place), backend=backend)
        made.sum().backward()
        assert own.grad is not None
        results.append((made.detach().cpu(), own.grad.cpu()))
    for name, found, expected in zip(("losses", "gradients"), *results, strict=True):
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
            raise KernelMismatch(f"{name} are off by up to {(found - expected).abs().max().item()}")


def _attention(heads: int, kv_heads: int, size: int, *dtypes: torch.dtype) -> Check:
    def check(device: torch.device, sizes: cases.Sizes) -> None:
        for dtype in dtypes:
            check_attention(device, heads, kv_heads, size, dtype, trees=True)

    return check


def checks(device: torch.device) -> tuple[tuple[str, float, Check], ...]:
    """Return name, device seconds and function of each check; in the interpreter one small attention shape."""
    shapes, dtypes = [(2, 1, 16)], [torch.float32]
    if device.type == "cuda":
        shapes, dtypes = [(32, 8, 128), (64, 8, 128), (16, 8, 128)], [torch.bfloat16, torch.float16]
    return (
        ("noise", 15, noise),
        ("masks", 15, masks),
        ("near ties", 10, near_ties),
        ("the engine's checks", 25, engine_checks),
        ("loss", 8, loss),
        *(
            (f"attention, {heads} heads over {kv_heads}", 20, _attention(heads, kv_heads, size, *dtypes))
            for heads, kv_heads, size in shapes
        ),
    )


_TOLERANCE = 2e-2
NOT_HERE = {"not measured": "the interpreter compiles nothing"}


def compiled() -> dict[str, list[dict[str, Any]]]:
    """Return the variants that this process has compiled: registers, spilled bytes, shared memory."""
    from kernels.coupled_sampler import triton_sample, triton_threshold
    from kernels.kd_loss import triton_kd
    from kernels.kv_pack import triton_copy
    from kernels.short_query_attention import triton_attend
    from kernels.w4a16 import triton_quantise

    modules = (
        triton_sample, triton_threshold, triton_attend, triton_kd, triton_copy, triton_quantise
    )  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    for module in modules:
        for name, kernel in vars(module).items():
            for caches in getattr(kernel, "device_caches", {}).values():
                for variant in caches[0].values():
                    found.setdefault(name, []).append(
                        {
                            "registers": variant.n_regs,
                            "spilled": variant.n_spills,
                            "shared": variant.metadata.shared,
                            "warps": variant.metadata.num_warps,
                        }
                    )
    return found


def resources(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Launch every kernel, and return the resources of the compiled code."""
    if device.type != "cuda":
        return NOT_HERE
    for queries in sizes.queries:
        attending(random_step(device, sizes.step, "even", 4, queries=queries))()
    for top_p in (None, 0.95):
        cases.sampling(cases.logits_of(device, sizes, 4, 4.0), top_p)()
    return compiled()


def recompiles(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Sample batches of many sizes, and return which of them had to wait for the compiler.

    KernelMismatch if any but the first did, because serving would then stop for seconds, again and again.
    """
    if device.type != "cuda":
        cases.sampling(cases.logits_of(device, sizes, sizes.rows, 4.0), 0.95)()
        return NOT_HERE
    logits = cases.logits_of(device, sizes, 128, 4.0)
    for top_p in (None, 0.95):
        cases.sampling(logits[:1], top_p)()
    before = {name: len(variants) for name, variants in compiled().items()}
    slow = {}
    for rows in (*range(1, 35), 48, 64, 96, 127, 128):
        for top_p in (None, 0.95):
            run = cases.sampling(logits[:rows], top_p)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            slow[f"{rows} rows, top-p {top_p}"] = time.perf_counter() - begin
    after = {name: len(variants) for name, variants in compiled().items()}
    if after != before:
        raise KernelMismatch(f"variants grew from {before} to {after}; launches took {slow}")
    return {"variants": after, "slowest launch": max(slow.items(), key=lambda item: item[1])}


def replayed(device: torch.device, sizes: cases.Sizes) -> dict[str, Any]:
    """Capture attention in a CUDA graph, and replay it with other lengths and other block tables.

    KernelMismatch if a replay differs from the reference.
    """
    from kernels.short_query_attention.triton_attend import attend_triton, prepare

    requests = min(16, sizes.requests)
    small = replace(sizes, context=min(1024, sizes.context), long=min(4096, sizes.long))
    step = random_step(device, small.step, "one long", requests, queries=sizes.queries[-1])
    rows = Scratch.rows_for(step.longest_query, step.group, device, tuning(device))
    scratch = Scratch.of(rows, sizes.head_size, device)
    out = torch.empty_like(step.query)
    prepare(step, step.longest_query, scratch)
    graph = captured(device, lambda: attend_triton(step, out=out, scratch=scratch))
    worst = 0.0
    for turn in range(3):
        # Rotate the batch: every request gets the context of another one.
        step.lengths.copy_(step.lengths.roll(turn))
        step.block_table.copy_(step.block_table.roll(turn, 0))
        graph()
        exact = attend_reference(step).float()
        off = ((out.float() - exact).abs().max() / exact.abs().max()).item()
        worst = max(worst, off)
        if not off < _TOLERANCE:
            raise KernelMismatch(f"replay {turn} is off by {off:.3g} of the largest entry")
    return {"replays": 3, "largest error": worst}


def captured(device: torch.device, run: Any) -> Any:
    """Return a function that replays `run`; without a device, `run` itself."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
