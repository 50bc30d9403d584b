"""Race of attention backends over one model's heads and lengths, and the choice of the fastest.

An engine runs the race at its start. Lengths are even, skewed, and even with drafts, since backends differ most in
how they distribute unequal requests; a few requests with drafts are the end of a rollout. `fastest` decides.
FlashInfer and vLLM's own attention are looked up by name when a benchmark or a race needs them, and are not
imported otherwise. Each maker raises its library's error if that is absent or of another version. Signatures were
read in vLLM 0.32, FlashInfer's as vLLM 0.32 calls them (its lock has FlashInfer 0.7.0). None of it was ever
executed: there was no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from math import exp, fsum, inf, isfinite, log

import torch

from kernels.short_query_attention.attend import attend
from kernels.short_query_attention.inputs import AttentionStep
from kernels.tuning import Run, timer

MARGIN, TOLERANCE = 0.05, 0.05


class AttentionName(StrEnum):
    """Backends: vLLM's own choice, our kernel for short queries within it, and FlashInfer."""

    VLLM = "vllm"
    OURS = "ours"
    FLASHINFER = "flashinfer"


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of one backend in one case, in seconds; infinite, with the error, where it does not run."""

    backend: AttentionName
    case: str
    seconds: float
    error: str = ""


def fastest(timings: Iterable[Timing]) -> AttentionName:
    """Return the backend to use. Of several times of a backend in a case the last counts. Pure.

    vLLM's own stays unless another is clearly faster: a second of timing is noisy, and a kernel that wins on even
    lengths may lose on the lengths of a real batch. So a backend is chosen only if it was timed in every case, is
    at least MARGIN faster over all of them, and slower than vLLM's in none by more than TOLERANCE. Times are
    compared by their ratios, so that a short case counts as much as a long one.
    """
    found: dict[AttentionName, dict[str, float]] = {}
    for timing in timings:
        found.setdefault(timing.backend, {})[timing.case] = timing.seconds
    baseline = found.pop(AttentionName.VLLM, {})
    if not baseline or not all(isfinite(seconds) and seconds > 0 for seconds in baseline.values()):
        return AttentionName.VLLM
    best, least = AttentionName.VLLM, 1 - MARGIN
    for name in sorted(found):
        ratios = [found[name].get(case, inf) / seconds for case, seconds in baseline.items()]
        # A NaN, or a time of nothing, is no measurement.
        if not all(0 < ratio <= 1 + TOLERANCE for ratio in ratios):
            continue
        mean = exp(fsum(map(log, ratios)) / len(ratios))
        if mean < least:
            best, least = name, mean
    return best


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model on one device, and the lengths and the number of the requests that it serves.

    `context` is of a usual request, `long` of a long one; `drafts` are the draft tokens of one that has drafts.
    """

    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    context: int = 8192
    long: int = 32_768
    block: int = 16
    drafts: int = 4
    requests: int = 128

    def within(self, most_bytes: int) -> AttentionShape:
        """Return the same with as many requests, and then as long a context, as fit the memory."""
        position = 4 * self.kv_heads * self.head_size
        long = max(1, min(self.long, most_bytes // 2 // position))
        context = max(1, min(self.context, long))
        requests = max(1, min(self.requests, (most_bytes // position - long) // context))
        return replace(self, long=long, context=context, requests=requests)


def context_lengths(kind: str, shape: AttentionShape, requests: int) -> torch.Tensor:
    """Return contexts of a batch, [requests] int32: "even", "one long" among short ones, or "log-normal"."""
    if kind == "even":
        found = torch.full((requests,), shape.context)
    elif kind == "one long":
        found = torch.full((requests,), shape.context // 4)
        found[requests // 2] = shape.long
    else:
        spread = torch.randn(requests, generator=torch.Generator().manual_seed(0)).exp()
        found = (spread * (shape.context // 4)).clamp(32, shape.long)
    return found.to(torch.int32)


def random_step(
    device: torch.device,
    shape: AttentionShape,
    kind: str,
    requests: int,
    *,
    group: int | None = None,
    queries: int = 1,
    drafted: int = 0,
    order: str = "NHD",
) -> AttentionStep:
    """Return a step in bfloat16 whose blocks of KV are shuffled.

    Args:
        device: device of its tensors.
        shape: heads and lengths.
        kind: how lengths differ, as for `context_lengths`.
        requests: number of requests.
        group: query heads that share a key-value head; None: as in `shape`.
        queries: query tokens of a request.
        drafted: requests that have `shape.drafts` query tokens more.
        order: NHD, a block's tokens before its heads in memory, vLLM's default, or HND.
    """
    lengths = context_lengths(kind, shape, requests)
    counts = (lengths + shape.block - 1) // shape.block
    table = torch.zeros(requests, int(counts.max()), dtype=torch.int32)
    shuffled = torch.randperm(int(counts.sum())).to(torch.int32).split(counts.tolist())
    for row, blocks in zip(table, shuffled, strict=True):
        row[: len(blocks)] = blocks
    inner = (shape.block, shape.kv_heads) if order == "NHD" else (shape.kv_heads, shape.block)
    numbers = {"dtype": torch.bfloat16, "device": device}
    cache = torch.randn(int(counts.sum()), *inner, 2 * shape.head_size, **numbers)
    keys, values = (cache if order == "NHD" else cache.transpose(1, 2)).split(shape.head_size, dim=-1)
    each = torch.full((requests,), queries)
    each[:drafted] += shape.drafts
    cu = torch.nn.functional.pad(each.cumsum(0), (1, 0)).to(torch.int32)
    heads = shape.heads if group is None else group * shape.kv_heads
    return AttentionStep(
        query=torch.randn(int(cu[-1]), heads, shape.head_size, **numbers),
        keys=keys,
        values=values,
        block_table=table.to(device),
        lengths=lengths.to(device),
        cu_queries=cu.to(device),
        longest_query=int(each.max()),
        longest=int(lengths.max()),
        scale=shape.head_size**-0.5,
    )


def vllm_attention(step: AttentionStep, generation: int) -> Run:
    """vLLM's FlashAttention over the same paged cache; 3 is the generation that vLLM takes on Hopper."""
    attention = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    def run() -> torch.Tensor:
        return attention(
            step.query,
            step.keys,
            step.values,
            max_seqlen_q=step.longest_query,
            cu_seqlens_q=step.cu_queries,
            max_seqlen_k=step.longest,
            seqused_k=step.lengths,
            softmax_scale=step.scale,
            causal=True,
            block_table=step.block_table,
            fa_version=generation,
        )

    return run


def vllm_own_attention(step: AttentionStep) -> Run:
    """vLLM's choice where it does not take FlashInfer: FlashAttention, or its Triton attention."""
    utilities = import_module("vllm.v1.attention.backends.fa_utils")
    generation = utilities.get_flash_attn_version(head_size=step.query.shape[2])
    if generation is None:
        return vllm_unified_attention(step)
    return vllm_attention(step, generation)


def vllm_unified_attention(step: AttentionStep) -> Run:
    """vLLM's Triton attention, which takes prefills and decoding in one launch too, over the same paged cache."""
    attention = import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    requests, heads, size = len(step.lengths), step.query.shape[1], step.query.shape[2]
    # As vLLM's metadata builder has it: few requests that decode are split into 16 segments.
    segments, few = 16, 128 // step.keys.shape[2]
    wide = 1 << (size - 1).bit_length()
    device = step.query.device
    parts = torch.empty(few, heads, segments, wide, dtype=torch.float32, device=device)
    peaks, sums = torch.empty(2, few, heads, segments, dtype=torch.float32, device=device)
    one = torch.ones(requests, step.keys.shape[2], dtype=torch.float32, device=device)
    out = torch.empty_like(step.query)

    def run() -> torch.Tensor:
        attention(
            q=step.query,
            k=step.keys,
            v=step.values,
            out=out,
            cu_seqlens_q=step.cu_queries,
            max_seqlen_q=step.longest_query,
            seqused_k=step.lengths,
            max_seqlen_k=step.longest,
            softmax_scale=step.scale,
            causal=True,
            window_size=(-1, -1) if step.window is None else (step.window - 1, 0),
            block_table=step.block_table,
            softcap=0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
            seq_threshold_3D=few,
            num_par_softmax_segments=segments,
            softmax_segm_output=parts,
            softmax_segm_max=peaks,
            softmax_segm_expsum=sums,
        )
        return out

    return run


def flashinfer_attention(step: AttentionStep) -> Run:
    """FlashInfer's paged prefill with ragged queries; planning is left out of the time."""
    prefill = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    device, block = step.query.device, step.keys.shape[1]
    counts = (step.lengths + block - 1) // block
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    starts[1:] = counts.cumsum(0)
    table = torch.cat([row[:count] for row, count in zip(step.block_table, counts.tolist(), strict=True)])
    wrapper = prefill(torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD")
    wrapper.plan(
        qo_indptr=step.cu_queries.cpu(),
        paged_kv_indptr=starts.cpu(),
        paged_kv_indices=table,
        paged_kv_last_page_len=((step.lengths - 1) % block + 1).cpu(),
        num_qo_heads=step.query.shape[1],
        num_kv_heads=step.keys.shape[2],
        head_dim_qk=step.query.shape[2],
        page_size=block,
        causal=True,
        sm_scale=step.scale,
        window_left=-1 if step.window is None else step.window - 1,
        q_data_type=step.query.dtype,
        kv_data_type=step.keys.dtype,
    )
    return lambda: wrapper.run(step.query, (step.keys, step.values))


MOST_BYTES = 1 << 30
"""Memory of the KV that is read."""
_MILLISECONDS = 60
_FEW = 4
"""Requests of the case in which few are left."""
Maker = Callable[[AttentionStep], Run]


def attending(step: AttentionStep) -> Run:
    """Return our attention of a step."""
    return partial(attend, step, backend="triton")


def backends(*, ours: bool) -> dict[AttentionName, Maker]:
    """Return makers of what is timed: vLLM's own attention, FlashInfer's, and with `ours` ours."""
    found: dict[AttentionName, Maker] = {
        AttentionName.VLLM: vllm_own_attention,
        AttentionName.FLASHINFER: flashinfer_attention,
    }
    return found | ({AttentionName.OURS: attending} if ours else {})


def race(
    device: torch.device, shape: AttentionShape, makers: Mapping[AttentionName, Maker]
) -> Iterator[Timing]:
    """Time each backend in each case. One that does not run has its error, and infinite times."""
    fitting = shape.within(MOST_BYTES)
    timed = timer(device, _MILLISECONDS)
    count = fitting.requests
    # "one long" has contexts of a quarter of the usual one around it.
    few = min(_FEW, count)
    cases = (
        ("even", "even", count, 0),
        ("one long", "one long", count, 0),
        ("drafts", "even", count, max(1, count // 4)),
        ("few", "even", few, few),
    )
    for name, kind, requests, drafted in cases:
        step = random_step(device, fitting, kind, requests, drafted=drafted)
        for backend, maker in makers.items():
            try:
                yield Timing(backend, name, timed(maker(step)))
            except Exception as error:  # Libraries that may be absent, or of another version; compilers.
                yield Timing(backend, name, float("inf"), f"{type(error).__name__}: {str(error)[:200]}")
