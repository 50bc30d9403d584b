"""Packing carries exactly the tokens of a request, and unpacking puts nothing else anywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_pack import BlockLayout, pack, packed_shape, unpack

BLOCK, BLOCKS, LAYERS = 8, 9, 2
LAYOUTS = [
    (BlockLayout(), (BLOCKS, 2, BLOCK, 6)),
    (BlockLayout(1, 2), (2, BLOCKS, BLOCK, 2, 3)),
    (BlockLayout(0, 1), (BLOCKS, BLOCK, 5)),
]


def slot(cache, layout, block, offset):
    return cache.select(layout.block_axis, block).select(layout.token_axis - 1, offset)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), case=st.sampled_from(LAYOUTS), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_request_arrives_whole_and_leaves_the_rest_alone(data, case, dtype):
    layout, shape = case
    count = data.draw(st.integers(0, BLOCKS))
    tokens = data.draw(st.integers((count - 1) * BLOCK + 1, count * BLOCK)) if count else 0
    here, there = (torch.tensor(data.draw(st.permutations(range(BLOCKS)))[:count]).long() for _ in range(2))
    caches = [torch.randn(shape).to(dtype) for _ in range(LAYERS)]
    size = packed_shape(caches, count, tokens, layout)
    assert size == (LAYERS, tokens * caches[0].numel() // (BLOCKS * BLOCK))
    buffer = torch.full(size, torch.nan, dtype=dtype)
    pack(caches, here, buffer, tokens=tokens, layout=layout)
    assert not buffer.isnan().any()
    received = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(LAYERS)]
    unpack(buffer, received, there, tokens=tokens, layout=layout)
    for cache, copy in zip(caches, received, strict=True):
        for token in range(tokens):
            entry, offset = divmod(token, BLOCK)
            sent, got = (
                slot(tensor, layout, int(blocks[entry]), offset)
                for tensor, blocks in ((cache, here), (copy, there))
            )
            assert torch.equal(sent, got)
        assert copy.isnan().sum() == cache.numel() - buffer[0].numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": torch.tensor([1, 9])}, r"0\.\.8, got 1\.\.9"),
        ({"blocks": torch.tensor([-1, 2])}, r"0\.\.8, got -1\.\.2"),
        ({"blocks": torch.tensor([3, 3])}, "twice"),
        ({"blocks": torch.tensor([1.0, 2.0])}, "int32 or int64"),
        ({"tokens": 8}, r"tokens must be in 9\.\.16 for 2 blocks of 8, got 8"),
        ({"tokens": 17}, "tokens must be in"),
        ({"out": torch.zeros(2, 191)}, r"out must be \[2, 192\]"),
        ({"out": torch.zeros(2, 192, dtype=torch.float16)}, "out must be"),
        ({"out": torch.zeros(192, 2).T}, "out must be contiguous"),
        ({"kv_caches": []}, "at least one layer"),
        ({"kv_caches": [torch.zeros(9, 2, 8, 6), torch.zeros(9, 2, 8, 7)]}, "must be alike"),
        ({"kv_caches": [torch.zeros(9, 8, 2, 6).transpose(1, 2)] * 2}, "must be contiguous"),
        ({"layout": BlockLayout(0, 5)}, "more than 5 axes"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {
        "kv_caches": [torch.zeros(9, 2, 8, 6)] * 2,
        "blocks": torch.tensor([1, 2]),
        "out": torch.zeros(2, 192),
    }
    with pytest.raises(ValueError, match=message):
        pack(**arguments | change)


def test_a_layout_has_its_tokens_behind_its_blocks():
    with pytest.raises(ValueError, match="block_axis < token_axis"):
        BlockLayout(2, 1)
