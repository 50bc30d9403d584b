"""Define the cases to measure: each kernel in its intended setting, with its minimum of bytes and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels.coupled_sampler.sample import Sampled, sample
from kernels.kd_loss import kd_loss
from kernels.kv_pack import pack, packed_shape, unpack
from kernels.short_query_attention import race
from kernels.short_query_attention.race import AttentionShape, attending, random_step
from kernels.tuning import Run
from kernels.w4a16 import quantise

Makers = dict[str, Callable[[], Run]]
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """Alternative implementations by name, ours first. A maker is called when its turn comes, and may fail.

    At least `moved` bytes must be read or written, `flops` operations done and `words` of noise drawn. The bound is
    the slowest of these at the ceilings.
    """

    kernel: str
    setting: str
    makers: Makers
    moved: int
    flops: int = 0
    words: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The settings; the report uses the defaults.

    Attention: BubbleSpec's Table 1 (batch 128 at 8k context, 32 requests with 4 drafts) with Qwen3-1.7B's heads,
    and skewed lengths: one of `long` positions among requests of a quarter of `context`. Sampler and loss:
    Qwen3's vocabulary. Rounding: a matrix of an 8B model. KV: a request of 8,000 tokens of Qwen3-8B, whose last
    block is partial.
    """

    requests: int = 128
    context: int = 8192
    long: int = 32_768
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
    noise: int = 1 << 24
    batches: tuple[int, ...] = (1, 4, 17, 34, 64, 128)
    groups: tuple[int, ...] = (2, 4, 8)
    queries: tuple[int, ...] = (1, 5, 16)

    @property
    def step(self) -> AttentionShape:
        """Heads and lengths of the attention steps."""
        return AttentionShape(
            self.heads, self.kv_heads, self.head_size, self.context, self.long, self.block, self.drafts
        )


def just(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Run]:
    """Return a maker that has nothing to prepare."""
    return lambda: partial(function, *arguments, **options)


def attention(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yield cases of attention: even and skewed batches, drafts, KV orders, batch sizes, groups, query lengths."""
    batch = sizes.requests
    shapes: list[tuple[str, int, dict[str, Any]]] = [
        ("even", batch, {}),
        ("even", batch, {"order": "HND"}),
        ("even", batch, {"drafted": sizes.drafted}),
        ("one long", batch, {}),
        ("log-normal", batch, {}),
        *(("even", requests, {}) for requests in sizes.batches if requests != batch),
        *(
            ("log-normal", batch // 2, {"group": g, "queries": q})
            for g in sizes.groups
            for q in sizes.queries
        ),
    ]
    for kind, requests, more in shapes:
        if requests == 0:
            continue
        step = random_step(device, sizes.step, kind, requests, **more)
        positions = int(step.lengths.sum()) * sizes.kv_heads * sizes.head_size
        rows = (step.lengths * step.cu_queries.diff()).sum()
        yield Case(
            "attention",
            ", ".join((f"{requests} {kind}", *(f"{name} {value}" for name, value in more.items()))),
            {
                "ours": partial(attending, step),
                "vLLM FlashAttention 3": partial(race.vllm_attention, step, 3),
                "vLLM FlashAttention 2": partial(race.vllm_attention, step, 2),
                "vLLM Triton": partial(race.vllm_unified_attention, step),
                "FlashInfer": partial(race.flashinfer_attention, step),
            },
            moved=2 * (2 * positions + 2 * step.query.numel()),
            flops=4 * int(rows) * step.query.shape[1] * sizes.head_size,
        )


def logits_of(device: torch.device, sizes: Sizes, rows: int, spread: float) -> torch.Tensor:
    """Return random logits [rows, V], normal with standard deviation `spread`."""
    return (torch.randn(rows, sizes.vocabulary, device=device) * spread).to(BF16)


def sampling(logits: torch.Tensor, top_p: float | None) -> Run:
    """Return our sampling of one token per row, with all inputs on the device."""
    rows, device = len(logits), logits.device
    seeds, ones = torch.arange(rows, device=device), torch.ones(rows, device=device)
    return partial(
        sample, logits, seeds, seeds, ones, seeds[:0], torch.arange(rows + 1),
        top_p=None if top_p is None else ones * top_p, backend="triton",
    )  # fmt: skip


def sampling_from_host(logits: torch.Tensor, top_p: float | None) -> Callable[[], Sampled]:
    """Return our sampling with the engine's host inputs in host memory, and a draft for every row but the last."""
    rows = len(logits)
    seeds = torch.arange(1)
    p = None if top_p is None else torch.full((1,), top_p, device=logits.device)
    return partial(
        sample, logits, seeds, seeds, torch.ones(1), torch.zeros(rows - 1, dtype=torch.int64),
        torch.tensor([0, rows]), top_p=p, backend="triton",
    )  # fmt: skip


def sampler(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yield cases of the sampler: nearly flat logits and spread ones, one row and many, with and without top-p."""
    for rows in sorted({1, sizes.rows}):
        for name, spread in (("flat", 0.5), ("spread 4", 4.0)):
            logits = logits_of(device, sizes, rows, spread)
            for mask, top_p in (("", None), (", top-p 0.95", 0.95)):
                makers: Makers = {
                    "ours": partial(sampling, logits, top_p),
                    "torch": just(_torch_sampling, logits, top_p),
                    "FlashInfer": partial(_flashinfer_sampling, logits, top_p),
                }
                setting = f"{rows} x {sizes.vocabulary} {name}{mask}"
                yield Case("sampler", setting, makers, logits.numel() * 2, words=logits.numel())


def _torch_sampling(logits: torch.Tensor, top_p: float | None) -> torch.Tensor:
    """Sample with the noise and the sorted row in memory, as vLLM's sampler does in PyTorch."""
    probabilities = logits.float().softmax(dim=-1)
    if top_p is None:
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
    ordered, index = probabilities.sort(dim=-1, descending=True)
    ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0
    return index.gather(1, (ordered / torch.empty_like(ordered).exponential_()).argmax(dim=-1, keepdim=True))


def _flashinfer_sampling(logits: torch.Tensor, top_p: float | None) -> Run:
    """Return FlashInfer's sampling of one token per row, without seeds per sample; top-p as vLLM calls it."""
    sampling = import_module("flashinfer.sampling")
    if top_p is None:
        return lambda: sampling.sampling_from_logits(logits.float())
    p = torch.full((len(logits),), top_p, device=logits.device)
    return lambda: sampling.top_p_sampling_from_probs(logits.softmax(dim=-1, dtype=torch.float32), p)


def rounding(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yield the case of rounding a matrix to 4 bits."""
    weight = torch.randn(sizes.outputs, sizes.inputs, dtype=BF16, device=device)
    makers: Makers = {
        "ours": just(quantise, weight, backend="triton"),
        "torch": just(quantise, weight, backend="reference"),
    }
    moved = weight.numel() * 2 + quantise(weight, backend="triton").nbytes
    yield Case("quantise", f"{sizes.outputs} x {sizes.inputs}", makers, moved)


def copies(device: torch.device, sizes: Sizes, backend: str) -> dict[str, Run]:
    """Return runs that pack a request's blocks and unpack them."""
    shape = (sizes.blocks, 2, sizes.block, sizes.kv_heads, sizes.head_size)
    caches = [torch.randn(shape, dtype=BF16, device=device) for _ in range(sizes.layers)]
    blocks = torch.randperm(sizes.blocks)[: -(-sizes.packed_tokens // sizes.block)]
    buffer = torch.empty(packed_shape(caches, len(blocks), sizes.packed_tokens), dtype=BF16, device=device)
    options: dict[str, Any] = {"tokens": sizes.packed_tokens, "backend": backend}
    return {
        "pack": partial(pack, caches, blocks, buffer, **options),
        "unpack": partial(unpack, buffer, caches, blocks, **options),
    }


def kv_pack(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yield cases of packing a request's blocks and unpacking them."""
    ours, theirs = copies(device, sizes, "triton"), copies(device, sizes, "reference")
    per_token = sizes.layers * 2 * sizes.kv_heads * sizes.head_size * 2
    for name in ours:
        makers: Makers = {"ours": just(ours[name]), "torch": just(theirs[name])}
        setting = f"{name} {sizes.packed_tokens} tokens, {sizes.layers} layers"
        yield Case("kv_pack", setting, makers, 2 * sizes.packed_tokens * per_token)


def losses(device: torch.device, sizes: Sizes, backend: str = "triton") -> tuple[Run, Run]:
    """Return the distillation loss over the vocabulary: the forward pass, and both passes."""
    shape = (sizes.tokens, sizes.vocabulary)
    teacher = torch.randn(shape, dtype=BF16, device=device)
    student = torch.randn(shape, dtype=BF16, device=device).requires_grad_()
    weights = torch.rand(sizes.tokens, device=device)

    def both() -> None:
        student.grad = None
        kd_loss(student, teacher, weights, backend=backend).sum().backward()

    return partial(kd_loss, student.detach(), teacher, weights, backend=backend), both


def loss(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Yield cases of the distillation loss."""
    ours, theirs = losses(device, sizes), losses(device, sizes, "reference")
    one = 2 * sizes.tokens * sizes.vocabulary
    for which, (name, moved) in enumerate((("forwards", 2 * one), ("and backwards", 5 * one))):
        makers: Makers = {"ours": just(ours[which]), "torch": just(theirs[which])}
        yield Case("kd_loss", f"{sizes.tokens} x {sizes.vocabulary} {name}", makers, moved)


CASES: dict[str, Callable[[torch.device, Sizes], Iterator[Case]]] = {
    "attention": attention,
    "sampler": sampler,
    "quantise": rounding,
    "kv_pack": kv_pack,
    "kd_loss": loss,
}
