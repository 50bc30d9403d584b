"""Check results on the device: bit for bit if they decide a token, otherwise within rounding.

All checks compare with plain numpy and torch. A check returns nothing. It raises `KernelMismatch`, or the error of
a kernel that does not compile or run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu.kernels import cases
from kernels.backend import KernelMismatch
from kernels.coupled_sampler.noise import gumbel
from kernels.coupled_sampler.reference import floors
from kernels.coupled_sampler.reference import thresholds as specified
from kernels.coupled_sampler.sample import sample
from kernels.selfcheck import check_attention, check_kv_pack, check_sampler, check_w4a16

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
