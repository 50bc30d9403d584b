"""Short-query attention against float64, over caches whose every slot that nobody should read is NaN."""

import pytest
import torch

from kernels.short_query_attention import Step
from kernels.short_query_attention.reference import attend_reference
from kernels.short_query_attention.triton_attend import attend_triton

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
    return Step(
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
    return Step(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"heads": 6, "size": 24, "packed": True}),
        (torch.float16, {"window": 7}),
        (torch.float32, {"window": 1, "heads": 2}),
        (torch.bfloat16, {"tree": True}),
        (torch.float32, {"tree": True, "packed": True, "size": 80}),
    ],
)
@pytest.mark.parametrize("pieces", ["whole", "split"])
def test_attention_is_within_rounding_of_float64(dtype, options, pieces, device):
    step = make_step(*MIXED, dtype, **options)
    step.check()
    exact = attend_reference(step, torch.float64).double()
    split = {"programs_wanted": 64, "least_piece": 32} if pieces == "split" else {"programs_wanted": 1}
    found = attend_triton(moved(step, device), **split).cpu().double()
    assert (found - exact).abs().max() / exact.abs().max() < TOLERANCE[dtype]


def test_a_request_does_not_see_the_others(device):
    alone = make_step([70], [4], torch.float32)
    found = attend_triton(moved(alone, device), programs_wanted=1).cpu()
    fields = {name: getattr(alone, name) for name in alone.__slots__}
    cu = torch.tensor([0, 0, 4, 4], dtype=torch.int32)
    fields |= {
        "lengths": torch.tensor([0, 70, 0]),
        "cu_queries": cu,
        "block_table": alone.block_table.expand(3, -1),
    }
    among = attend_triton(moved(Step(**fields), device), programs_wanted=1).cpu()
    assert torch.equal(found, among)


def test_extreme_scores_leave_a_distribution(device):
    step = make_step([40], [3], torch.float32)
    step.keys.mul_(1e4)
    exact = attend_reference(step, torch.float64).double()
    found = attend_triton(moved(step, device), programs_wanted=64, least_piece=16).cpu().double()
    assert torch.isfinite(found).all()
    assert (found - exact).abs().max() < 1e-3
