"""Check compiled code on the device: registers, spills, captures in CUDA graphs, and compilation while serving."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from bench.gpu.kernels import cases
from kernels.backend import KernelMismatch
from kernels.short_query_attention.attend import attend_reference
from kernels.short_query_attention.inputs import Scratch
from kernels.short_query_attention.race import attending, random_step
from kernels.tuning import tuning

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
