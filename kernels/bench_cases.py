"""Benchmark cases: each kernel in its intended setting, with the least bytes and operations that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels import bench_rivals as rivals
from kernels.coupled_sampler.sample import sample
from kernels.kd_loss import kd_loss
from kernels.kv_pack import pack, packed_shape, unpack
from kernels.short_query_attention import AttentionStep, attend
from kernels.w4a16 import matmul, quantise

Run = Callable[[], Any]
Makers = dict[str, Callable[[], Run]]
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """Ways of doing one thing by name, ours first; a maker is called when its turn comes, and may fail.

    `moved` bytes must be read or written once, `flops` done: the roofline is the slower of both at the ceilings.
    """

    kernel: str
    setting: str
    moved: int
    flops: int
    makers: Makers


@dataclass(frozen=True, slots=True)
class Sizes:
    """The settings; the defaults are those that are reported.

    Attention: BubbleSpec's Table 1 (batch 128 at 8k context, 32 requests with 4 drafts) with Qwen3-1.7B's heads.
    Sampler and loss: Qwen3's vocabulary. W4A16: a matrix of an 8B model. KV: a request of 8,000 tokens of Qwen3-8B,
    its last block partial.
    """

    requests: int = 128
    context: int = 8192
    drafted: int = 32
    drafts: int = 4
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    block: int = 16
    rows: int = 128
    vocabulary: int = 151_936
    outputs: int = 12_288
    inputs: int = 4_096
    layers: int = 36
    blocks: int = 2_048
    packed_tokens: int = 7_993
    tokens: int = 2_048


def just(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Run]:
    """Return a maker that has nothing to prepare."""
    return lambda: partial(function, *arguments, **options)


def attention(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """One token a request, some with drafts, and one request alone: in one launch, in two, and by others."""
    per_request = sizes.context // sizes.block
    blocks = sizes.requests * per_request
    shape = (2, blocks, sizes.block, sizes.kv_heads, sizes.head_size)
    keys, values = torch.randn(shape, dtype=BF16, device=device)
    table = torch.randperm(blocks).to(device, torch.int32).view(sizes.requests, per_request)
    for requests, drafted in ((sizes.requests, 0), (sizes.requests, sizes.drafted), (1, 0)):
        queries = torch.ones(requests, dtype=torch.int64)
        queries[:drafted] += sizes.drafts
        cu = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).to(torch.int32)
        step = AttentionStep(
            query=torch.randn(int(cu[-1]), sizes.heads, sizes.head_size, dtype=BF16, device=device),
            keys=keys,
            values=values,
            block_table=table[:requests],
            lengths=torch.full((requests,), sizes.context, dtype=torch.int32, device=device),
            cu_queries=cu.to(device),
            longest_query=int(queries.max()),
            longest=sizes.context,
            scale=sizes.head_size**-0.5,
        )
        makers: Makers = {"ours": just(attend, step)}
        if drafted:
            makers["ours, batch split"] = partial(_split, step, drafted)
        makers["vLLM FlashAttention"] = partial(rivals.vllm_attention, step)
        makers["vLLM Triton"] = partial(rivals.vllm_unified_attention, step)
        makers["FlashInfer"] = partial(rivals.flashinfer_attention, step)
        setting = f"{requests} x {sizes.context}, {drafted} with {sizes.drafts} drafts"
        positions = requests * sizes.context * sizes.kv_heads * sizes.head_size
        moved = 2 * (2 * positions + 2 * step.query.numel())
        yield Case("attention", setting, moved, 4 * step.query.numel() * sizes.context, makers)


def _split(step: AttentionStep, drafted: int) -> Run:
    """Return the same by two launches: requests with drafts, and those without."""
    rows = int(step.cu_queries[drafted])
    parts = [
        replace(
            step,
            query=step.query[tokens],
            block_table=step.block_table[which],
            lengths=step.lengths[which],
            cu_queries=cu,
            longest_query=longest,
        )
        for tokens, which, cu, longest in (
            (slice(rows), slice(drafted), step.cu_queries[: drafted + 1], step.longest_query),
            (slice(rows, None), slice(drafted, None), step.cu_queries[drafted:] - rows, 1),
        )
    ]
    return lambda: [attend(part) for part in parts]


def sampler(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yield cases of the sampler: nearly flat logits and peaked ones, with and without top-p."""
    seeds = torch.arange(sizes.rows, device=device)
    ones, cu = torch.ones(sizes.rows, device=device), torch.arange(sizes.rows + 1)
    for name, spread in (("flat", 0.5), ("spread 4", 4.0)):
        logits = (torch.randn(sizes.rows, sizes.vocabulary, device=device) * spread).to(BF16)
        for mask, top_p in (("", None), (", top-p 0.95", ones * 0.95)):
            makers: Makers = {
                "ours": just(sample, logits, seeds, seeds, ones, seeds[:0], cu, top_p=top_p),
                "torch": just(_torch_sampling, logits, top_p),
            }
            if top_p is not None:
                makers["FlashInfer"] = partial(rivals.flashinfer_sampling, logits, top_p)
            setting = f"{sizes.rows} x {sizes.vocabulary} {name}{mask}"
            yield Case("sampler", setting, logits.numel() * 2, 0, makers)


def _torch_sampling(logits: torch.Tensor, top_p: torch.Tensor | None) -> torch.Tensor:
    """With noise, and the sorted row, in memory, as vLLM's sampler does it in PyTorch."""
    probabilities = logits.float().softmax(dim=-1)
    if top_p is None:
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
    ordered, index = probabilities.sort(dim=-1, descending=True)
    ordered[ordered.cumsum(dim=-1) - ordered >= top_p.unsqueeze(1)] = 0
    return index.gather(1, (ordered / torch.empty_like(ordered).exponential_()).argmax(dim=-1, keepdim=True))


def w4a16(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Quantising a matrix, and its product with 1 to 64 rows."""
    weight = torch.randn(sizes.outputs, sizes.inputs, dtype=BF16, device=device)
    packed = quantise(weight)
    makers: Makers = {"ours": just(quantise, weight), "torch": just(quantise, weight, backend="reference")}
    shape = f"{sizes.outputs} x {sizes.inputs}"
    yield Case("quantise", shape, weight.numel() * 2 + packed.nbytes, 0, makers)
    for rows in (1, 16, 64):
        x = torch.randn(rows, sizes.inputs, dtype=BF16, device=device)
        makers = {
            "ours": just(matmul, x, packed),
            "torch bfloat16": just(torch.matmul, x, weight.T),
            "vLLM Marlin": partial(rivals.marlin_matmul, x, weight, packed.group),
        }
        moved = packed.nbytes + 2 * rows * (sizes.inputs + sizes.outputs)
        yield Case("w4a16", f"{rows} rows x {shape}", moved, 2 * rows * weight.numel(), makers)


def kv_pack(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yield cases of packing a request's blocks and unpacking them."""
    shape = (sizes.blocks, 2, sizes.block, sizes.kv_heads, sizes.head_size)
    caches = [torch.randn(shape, dtype=BF16, device=device) for _ in range(sizes.layers)]
    blocks = torch.randperm(sizes.blocks)[: -(-sizes.packed_tokens // sizes.block)]
    buffer = torch.empty(packed_shape(caches, len(blocks), sizes.packed_tokens), dtype=BF16, device=device)
    options = {"tokens": sizes.packed_tokens}
    for name, function, arguments in (
        ("pack", pack, (caches, blocks, buffer)),
        ("unpack", unpack, (buffer, caches, blocks)),
    ):
        makers: Makers = {
            "ours": just(function, *arguments, **options),
            "torch": just(function, *arguments, **options, backend="reference"),
        }
        setting = f"{name} {sizes.packed_tokens} tokens, {sizes.layers} layers"
        yield Case("kv_pack", setting, 2 * buffer.numel() * 2, 0, makers)


def loss(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Distillation over the vocabulary, forwards, and forwards and backwards."""
    shape = (sizes.tokens, sizes.vocabulary)
    teacher = torch.randn(shape, dtype=BF16, device=device)
    student = torch.randn(shape, dtype=BF16, device=device).requires_grad_()
    weights = torch.rand(sizes.tokens, device=device)

    def both(backend: str) -> None:
        student.grad = None
        kd_loss(student, teacher, weights, backend=backend).sum().backward()

    def forwards(backend: str) -> None:
        kd_loss(student.detach(), teacher, weights, backend=backend)

    one = 2 * teacher.numel()
    for name, function, moved in (("forwards", forwards, 2 * one), ("and backwards", both, 5 * one)):
        makers: Makers = {"ours": just(function, "auto"), "torch": just(function, "reference")}
        yield Case("kd_loss", f"{sizes.tokens} x {sizes.vocabulary} {name}", moved, 0, makers)


CASES: dict[str, Callable[[torch.device, Sizes], Iterator[Case]]] = {
    "attention": attention,
    "sampler": sampler,
    "w4a16": w4a16,
    "kv_pack": kv_pack,
    "kd_loss": loss,
}
