"""The sampler's kernels: the integers and noise of the specification to the bit, and the CPU sampler's tokens."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.coupled_sampler import Domain, gumbel, triton_threshold
from kernels.coupled_sampler.noise import words
from kernels.coupled_sampler.reference import floors, mass_of
from kernels.coupled_sampler.reference import thresholds as specified
from kernels.coupled_sampler.sample import sample
from kernels.coupled_sampler.triton_noise import gumbel_of, of_order_key, order_key, words_of
from kernels.coupled_sampler.triton_sample import LogitPart, thresholds
from kernels.coupled_sampler.triton_threshold import mass_of as mass_in_triton
from kernels.tuning import Tuning, multiprocessors, using


@triton.jit
def _noise(seed, position, domain, out_words, out_gumbel, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = words_of(key, tl.load(position), domain, start, BLOCK, WIDE)
    offset = start + 4 * tl.arange(0, BLOCK // 4)
    tl.store(out_words + offset, w0.to(tl.int64))
    tl.store(out_words + offset + 1, w1.to(tl.int64))
    tl.store(out_words + offset + 2, w2.to(tl.int64))
    tl.store(out_words + offset + 3, w3.to(tl.int64))
    tl.store(out_gumbel + offset, gumbel_of(w0))
    tl.store(out_gumbel + offset + 1, gumbel_of(w1))
    tl.store(out_gumbel + offset + 2, gumbel_of(w2))
    tl.store(out_gumbel + offset + 3, gumbel_of(w3))


@triton.jit
def _maps(x, masses, keys, back, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset)
    key = order_key(value)
    tl.store(masses + offset, mass_in_triton(tl.minimum(value, 0.0)))
    tl.store(keys + offset, key.to(tl.int64))
    tl.store(back + offset, of_order_key(key))


@pytest.mark.parametrize("seed", [0x0123456789ABCDEF, 0, 2**64 - 1])
@pytest.mark.parametrize(("position", "wide"), [(7, True), (7, False), (2**32 - 1, True)])
def test_noise_is_the_specifications_to_the_bit(seed, position, wide, device):
    size = 4096
    out = torch.empty(size, dtype=torch.int64, device=device)
    floats = torch.empty(size, dtype=torch.float32, device=device)
    key = torch.from_numpy(np.array([seed], np.uint64).view(np.int64)).to(device)
    place = torch.tensor([position], device=device)
    _noise[(2,)](key, place, int(Domain.RESIDUAL), out, floats, BLOCK=2048, WIDE=wide, enable_fp_fusion=False)
    expected = words(seed, position, size, Domain.RESIDUAL)
    np.testing.assert_array_equal(out.cpu().numpy().astype(np.uint32), expected)
    expected = gumbel(seed, position, size, Domain.RESIDUAL)
    np.testing.assert_array_equal(floats.cpu().numpy().view(np.int32), expected.view(np.int32))


def test_masses_and_keys_are_the_specifications_to_the_bit(device):
    rng = np.random.default_rng(0)
    values = np.concatenate(
        (rng.uniform(-29, 0, 2000), rng.normal(0, 1e30, 44), [0.0, -0.0, -np.inf, -27.5])
    ).astype(np.float32)
    x = torch.from_numpy(values).to(device)
    masses, keys = (torch.empty(len(x), dtype=torch.int64, device=device) for _ in range(2))
    back = torch.empty_like(x)
    _maps[(2,)](x, masses, keys, back, BLOCK=1024, enable_fp_fusion=False)
    np.testing.assert_array_equal(masses.cpu().numpy(), mass_of(np.minimum(values, 0)))
    order = np.argsort(keys.cpu().numpy(), kind="stable")
    assert (np.diff(values[order]) >= 0).all()
    np.testing.assert_array_equal(back.cpu().numpy(), values)


def make_logits(kind, rows, width, rng):
    logits = rng.normal(0, 3, (rows, width))
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "peaked":
        logits[np.arange(rows), rng.integers(0, width, rows)] += 30
    elif kind == "masked":
        logits[rng.random((rows, width)) < 0.7] = -np.inf
    elif kind == "huge":
        logits *= 1e30
    elif kind == "zeros":
        logits = np.where(logits > 0, 0.0, -0.0)
    elif kind == "far":
        logits *= 20
    elif kind == "bad":
        logits[0, width // 2], logits[1, 0], logits[2] = np.nan, np.inf, -np.inf
    return torch.from_numpy(logits.astype(np.float32))


def sample_both(logits, temperatures, device, top_k=None, top_p=None):
    """A request without drafts, one with two true drafts, and one whose only draft is wrong, by both backends."""
    rng = np.random.default_rng(len(temperatures))
    cu = torch.tensor([0, 1, 4, 6])
    seeds = torch.from_numpy(rng.integers(0, 2**64, 3, dtype=np.uint64).view(np.int64))
    positions = torch.from_numpy(rng.integers(0, 2**32 - 4, 3))
    owner = torch.tensor([0, 1, 1, 1, 2, 2])
    offset = torch.tensor([0, 0, 1, 2, 0, 1])
    temperature = torch.tensor(temperatures, dtype=torch.float32)
    masks = {"top_k": top_k and torch.tensor(top_k), "top_p": top_p and torch.tensor(top_p)}
    rows = {name: mask if mask is None else mask[owner] for name, mask in masks.items()}
    each = torch.arange(7)
    alone = sample(
        logits, seeds[owner], positions[owner] + offset, temperature[owner], each[:0], each,
        backend="reference", **rows,
    )  # fmt: skip
    drafts = torch.stack((alone.tokens[1], alone.tokens[2], alone.tokens[4] + 1))
    arguments = (logits, seeds, positions, temperature, drafts)
    expected = sample(*arguments, cu, backend="reference", **masks)
    there = {name: mask if mask is None else mask.to(device) for name, mask in masks.items()}
    found = sample(*(a.to(device) for a in arguments), cu, backend="triton", **there)
    return expected, found


def small(rows, device):
    """Small blocks, several in a piece and two pieces a row: a block is barred by those before it in its piece."""
    programs = -(-2 * rows // multiprocessors(device))
    return Tuning(
        scan_block=64, scan_programs=programs, scan_stages=1, search_block=128, search_programs=programs
    )


@pytest.mark.parametrize(
    ("kind", "width", "dtype", "temperatures", "top_k", "top_p"),
    [
        ("flat", 1, torch.float32, (1.0, 1.0, 1.0), None, None),
        ("flat", 260, torch.float32, (1.0, 0.0, 0.7), None, None),
        ("flat", 260, torch.float16, (1.0, 0.3, 2.0), None, None),
        ("peaked", 260, torch.bfloat16, (1.0, 1.0, 1.0), None, None),
        ("ties", 200, torch.float32, (0.0, 1.0, 1e-3), None, None),
        ("masked", 200, torch.float32, (1.0, 0.0, 1.0), None, None),
        ("huge", 200, torch.float32, (1e-30, 1e30, 1.0), None, None),
        ("zeros", 200, torch.float32, (1e30, 0.0, 0.0), None, None),
        ("bad", 200, torch.float32, (1.0, -1.0, float("nan")), None, None),
        ("bad", 200, torch.float32, (1.0, 1.0, 1.0), [3, 3, 3], [0.5, 0.5, 0.5]),
        pytest.param("ties", 200, torch.float32, (1.0, 1.0, 1.0), [3, 20, 1], None, marks=pytest.mark.soak),
        pytest.param(
            "ties", 200, torch.float32, (1.0, 1.0, 1.0), None, [0.3, 0.9, 0.0], marks=pytest.mark.soak
        ),
        ("flat", 260, torch.bfloat16, (0.7, 1.3, 0.0), [0, 300, 5], [0.9, 1.0, 0.5]),
        pytest.param(
            "masked",
            200,
            torch.float32,
            (0.7, 1.0, 1.0),
            [150, 40, 2],
            [0.99, 0.5, 0.95],
            marks=pytest.mark.soak,
        ),
    ],
)
def test_tokens_are_the_cpu_samplers(kind, width, dtype, temperatures, top_k, top_p, device):
    logits = make_logits(kind, 6, width, np.random.default_rng(width)).to(dtype)
    with using(small(len(logits), device)):
        expected, found = sample_both(logits, temperatures, device, top_k, top_p)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.counts.tolist() == expected.counts.tolist()
    torch.testing.assert_close(found.logprobs.cpu(), expected.logprobs, equal_nan=True, rtol=1e-5, atol=1e-4)
    if kind != "huge":
        torch.testing.assert_close(
            found.processed.cpu(), expected.processed, equal_nan=True, rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize(
    ("tied", "level", "rise"),
    [
        ("entries", 0.0, 0.0),
        pytest.param("entries", 3e4, 0.0, marks=pytest.mark.soak),
        pytest.param("blocks", 0.0, 0.0, marks=pytest.mark.soak),
        ("blocks", 0.0, 1e-5),
        ("blocks", 3e4, 0.01),
    ],
)
def test_tokens_are_the_cpu_samplers_when_scores_nearly_tie(tied, level, rise, device):
    """Scores of all entries, or of each block's best, agree up to rounding: a wrong operation shows.

    With a rise each block is just better than those before it, and a bound that is a little too high shows.
    """
    block, size, rows = 64, 320, 4
    seeds, positions = torch.arange(rows) + 99, torch.arange(rows) * 1000
    noise = np.stack([gumbel(int(s), int(p), size) for s, p in zip(seeds, positions, strict=True)])
    if tied == "blocks":
        noise = noise.reshape(rows, -1, block).max(axis=2).repeat(block, axis=1)
    rises = np.float32(rise) * (np.arange(size) // block)
    logits = torch.from_numpy((np.float32(level) - noise + rises).astype(np.float32))
    arguments = (logits, seeds, positions, torch.ones(rows), seeds[:0])
    expected = sample(*arguments, torch.arange(rows + 1), backend="reference")
    with using(small(rows, device)):
        found = sample(*(a.to(device) for a in arguments), torch.arange(rows + 1), backend="triton")
    assert found.tokens.tolist() == expected.tokens.tolist()


MIN_PS = {"no min-p": (0, 0, 0, 0, 0), "min-p": (0.9, 0.02, 1.0, 0, 1e-4)}
CAPACITIES = {"room": triton_threshold.CAPACITY, "no room": 8}
SHORT = {"flat, min-p, room", "ties, no min-p, no room", "masked, min-p, no room", "far, no min-p, room"}


@pytest.mark.parametrize(
    ("kind", "min_p", "capacity"),
    [
        pytest.param(
            kind, min_p, capacity, id=name, marks=[] if name in SHORT else [pytest.mark.soak],
        )
        for kind in ("flat", "ties", "masked", "far")
        for of_min_p, min_p in MIN_PS.items()
        for of_capacity, capacity in CAPACITIES.items()
        for name in (f"{kind}, {of_min_p}, {of_capacity}",)
    ],
)  # fmt: skip
def test_thresholds_are_the_specifications_to_the_bit(kind, min_p, capacity, device, monkeypatch):
    monkeypatch.setattr(triton_threshold, "CAPACITY", capacity)
    monkeypatch.setattr(triton_threshold, "_CAPACITY", tl.constexpr(capacity))
    rows, width = 5, 150
    logits = make_logits(kind, rows, width, np.random.default_rng(3))
    temperatures = np.array([1.0, 0.7, 3.0, 1.0, 0.5], np.float32)
    top_k, top_p = np.array([5, 0, 149, 40, 3]), np.array([1.0, 0.9, 0.3, 0.99, 0.0], np.float32)
    floor = floors(np.array(min_p, np.float32))
    out = torch.empty(rows, device=device)
    given = {"temperature": temperatures, "top_k": top_k, "top_p": top_p, "owners": np.arange(rows)}
    given = given | {"floors": floor} if any(min_p) else given
    there = {name: torch.from_numpy(vector).to(device) for name, vector in given.items()}
    # Rows of two tensors, in another order than in the step.
    places = torch.tensor([[3, 0, 1], [4, 2, 0]], device=device)
    first = LogitPart(logits[[1, 3, 0]].to(device), places[0], torch.tensor([1, 2, 0], device=device))
    second = LogitPart(logits[[2, 4]].to(device), places[1, :2], torch.tensor([1, 0], device=device))
    with using(small(rows, device)):
        thresholds([first, second], there, out)
    expected = specified(logits.numpy() / temperatures[:, None], top_k, top_p, floor)
    np.testing.assert_array_equal(out.cpu().numpy(), expected)


def test_no_requests_give_nothing(device):
    none = torch.empty(0, dtype=torch.int64, device=device)
    logits, temperature = torch.empty(0, 9, device=device), torch.empty(0, device=device)
    found = sample(logits, none, none, temperature, none, torch.tensor([0]), backend="triton")
    assert found.tokens.shape == found.counts.shape == (0,)
