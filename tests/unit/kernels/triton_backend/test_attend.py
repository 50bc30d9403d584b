"""Short-query attention against float64, over caches whose every slot that nobody should read is NaN."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl

from kernels.backend import KernelMismatch
from kernels.selfcheck import check_attention
from kernels.short_query_attention import AttentionStep, triton_attend
from kernels.short_query_attention.attend import attend_reference
from kernels.short_query_attention.inputs import Scratch, tile_rows
from kernels.short_query_attention.triton_attend import attend_triton, prepare
from kernels.tuning import Tuning

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BLOCK = 16
MIXED = ([50, 3, 0, 17, 16, 130], [1, 3, 0, 5, 1, 16])
"""Lengths and query tokens: decoding, nothing but drafts, nothing, drafts over a block's edge, a full block."""


def make_step(
    lengths, queries, dtype, *, heads=4, kv_heads=2, size=16, window=None, tree=False, packed=False
):
    """A step with shuffled blocks; unused slots are NaN, unused entries of the block table out of range."""
    torch.manual_seed(sum(lengths))
    columns = -(-max(*lengths, 1) // BLOCK)
    count = len(lengths) * columns + 3
    if packed:
        cache = torch.full((count, kv_heads, BLOCK, 2 * size), torch.nan, dtype=dtype)
        keys, values = (half.permute(0, 2, 1, 3) for half in cache.split(size, dim=-1))
    else:
        keys, values = torch.full((2, count, BLOCK, kv_heads, size), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), columns), 10**6, dtype=torch.int32)
    free = iter(torch.randperm(count).tolist())
    for n, (length, own) in enumerate(zip(lengths, queries, strict=True)):
        begin = 0 if window is None else max(0, length - own - window + 1)
        for entry in range(begin // BLOCK, -(-length // BLOCK)):
            table[n, entry] = block = next(free)
            filled = slice(max(begin - entry * BLOCK, 0), min(length - entry * BLOCK, BLOCK))
            for cache in (keys, values):
                cache[block, filled] = torch.randn(cache[block, filled].shape).to(dtype)
    cu = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    return AttentionStep(
        query=torch.randn(sum(queries), heads, size).to(dtype),
        keys=keys,
        values=values,
        block_table=table,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        cu_queries=cu,
        longest_query=max(queries),
        longest=max(lengths),
        scale=size**-0.5,
        window=window,
        tree=torch.tensor([bits for own in queries for bits in ancestors(own)]) if tree else None,
    )


def ancestors(count):
    """Ancestor masks of a random tree."""
    masks = []
    for node in range(count):
        parent = int(torch.randint(-1, node, (1,))) if node else -1
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks


def moved(step, device):
    fields = {name: getattr(step, name) for name in step.__slots__}
    return AttentionStep(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


def share_among(monkeypatch, programs, **changes):
    """Have so many programs share units of 32 positions, or as `changes` say."""
    monkeypatch.setattr(triton_attend, "programs_for", lambda device, chosen: programs)
    chosen = Tuning(**{"attention_chunk": 32, "attention_across": 32, "attention_stages": 2, **changes})
    monkeypatch.setattr(triton_attend, "tuning", lambda device: chosen)


OPTIONS = (
    (torch.float32, {}),
    (torch.bfloat16, {"heads": 6, "size": 24, "packed": True}),
    (torch.float16, {"window": 7}),
    (torch.float32, {"window": 1, "heads": 2}),
    (torch.bfloat16, {"tree": True}),
    (torch.float32, {"tree": True, "packed": True, "size": 80}),
)
SHORT = {(0, 1), (0, 40), (1, 5), (2, 5), (3, 40), (4, 1), (5, 40)}
"""Numbers of options, and of programs: each number of programs with and without a window and a tree."""


@pytest.mark.parametrize(
    ("dtype", "options", "programs"),
    [
        pytest.param(*each, programs, marks=[] if (number, programs) in SHORT else [pytest.mark.soak])
        for number, each in enumerate(OPTIONS)
        for programs in (1, 5, 40)
    ],
)
def test_attention_is_within_rounding_of_float64(dtype, options, programs, device, monkeypatch):
    step = make_step(*MIXED, dtype, **options)
    step.check()
    exact = attend_reference(step, torch.float64).double()
    share_among(monkeypatch, programs)
    found = attend_triton(moved(step, device)).cpu().double()
    assert (found - exact).abs().max() / exact.abs().max() < TOLERANCE[dtype]


def test_a_request_does_not_see_the_others(device, monkeypatch):
    share_among(monkeypatch, 1)
    alone = make_step([70], [4], torch.float32)
    found = attend_triton(moved(alone, device)).cpu()
    fields = {name: getattr(alone, name) for name in alone.__slots__}
    cu = torch.tensor([0, 0, 4, 4], dtype=torch.int32)
    fields |= {
        "lengths": torch.tensor([0, 70, 0]),
        "cu_queries": cu,
        "block_table": alone.block_table.expand(3, -1),
    }
    among = attend_triton(moved(AttentionStep(**fields), device)).cpu()
    assert torch.equal(found, among)


def test_extreme_scores_leave_a_distribution(device, monkeypatch):
    share_among(monkeypatch, 64, attention_chunk=16, attention_across=16)
    step = make_step([40], [3], torch.float32)
    step.keys.mul_(1e4)
    exact = attend_reference(step, torch.float64).double()
    found = attend_triton(moved(step, device)).cpu().double()
    assert torch.isfinite(found).all()
    assert (found - exact).abs().max() < 1e-3


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(1024, id="room"),
        pytest.param(2 * 3 * 32, id="for three programs"),
        pytest.param(2 * 32, id="for one", marks=pytest.mark.soak),
    ],
)
def test_a_launch_into_given_memory_takes_none_and_leaves_padding_alone(rows, device, monkeypatch):
    share_among(monkeypatch, 12)
    step = make_step(*MIXED, torch.float32)
    padded = replace(step, query=torch.cat((step.query, torch.full((3, 4, 16), torch.nan))))
    out = torch.full((29, 4, 16), 7.0, device=device)
    scratch = Scratch.of(rows, 16, device)
    scratch.parts.fill_(torch.nan)
    assert attend_triton(moved(padded, device), out=out, scratch=scratch) is out
    found = out.cpu()
    assert (found[26:] == 7).all()
    exact = attend_reference(step, torch.float64).double()
    assert (found[:26].double() - exact).abs().max() / exact.abs().max() < TOLERANCE[torch.float32]


def test_one_long_context_among_many_short_ones_is_right(device, monkeypatch):
    """More requests than are looked at together, most of them without a query, and one that many programs share."""
    monkeypatch.setattr(triton_attend, "_REQUESTS_AT_ONCE", tl.constexpr(4))
    share_among(monkeypatch, 5)
    lengths, queries = [3] * 11, [0] * 11
    for place, length, own in ((0, 20, 2), (6, 200, 1), (10, 40, 3)):
        lengths[place], queries[place] = length, own
    step = make_step(lengths, queries, torch.float32)
    exact = attend_reference(step, torch.float64).double()
    found = attend_triton(moved(step, device)).cpu().double()
    assert (found - exact).abs().max() / exact.abs().max() < TOLERANCE[torch.float32]


def test_bounds_shape_a_launch_and_not_its_result(device, monkeypatch):
    """As a captured graph has it: bounds of the longest context there may be, lengths of those there are."""
    share_among(monkeypatch, 7)
    step = moved(make_step(*MIXED, torch.float32), device)
    exact = attend_reference(make_step(*MIXED, torch.float32), torch.float64).double()
    found = attend_triton(replace(step, longest=10**6, longest_query=20)).cpu().double()
    assert (found - exact).abs().max() / exact.abs().max() < TOLERANCE[torch.float32]


def test_preparing_launches_each_kind_of_step_and_writes_nothing(device, monkeypatch):
    step = moved(make_step(*MIXED, torch.float32, heads=8), device)
    scratch = Scratch.of(Scratch.rows_for(16, 4, device, Tuning()), 16, device)
    for part in (scratch.parts, scratch.peaks, scratch.sums):
        part.fill_(7)
    launched = set()
    real = triton_attend.attend_triton

    def attend(step, **options):
        launched.add(tile_rows(step.longest_query, 4, 32))
        return real(step, **options)

    monkeypatch.setattr(triton_attend, "attend_triton", attend)
    prepare(step, 16, scratch)
    assert launched == {16, 32}
    assert all((part == 7).all() for part in (scratch.parts, scratch.peaks, scratch.sums))


def test_the_check_before_serving_finds_wrong_attention(device, monkeypatch):
    """That what is right passes is shown by the tests of integration/kernels, where engines start."""
    real = triton_attend.attend_triton
    # A kernel that ignores the mask is wrong for trees alone.
    monkeypatch.setattr(triton_attend, "attend_triton", lambda step: real(replace(step, tree=None)))
    check_attention(device, 4, 2, 16, torch.float16)
    with pytest.raises(KernelMismatch, match="4 heads of 16 over 2"):
        check_attention(device, 4, 2, 16, torch.float16, trees=True)
    monkeypatch.setattr(
        triton_attend, "attend_triton", lambda step: real(replace(step, scale=2 * step.scale))
    )
    with pytest.raises(KernelMismatch, match="4 heads of 16 over 2"):
        check_attention(device, 4, 2, 16, torch.float16)
